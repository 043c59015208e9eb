"""HostedLatents: host memory and hot buffers of an engine whose latents are in host memory (HiSparse)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from quire.counters import Section
from quire.engine.host_memory import alone_on_this_host, host_memory
from quire.errors import HostMemoryError
from quire.kernels.moves import Moves
from quire.loop import ForwardPart, Part
from quire.memory.host_pool import HostPool, Progress
from quire.memory.pool import Pool
from quire.models.check import check_forward
from quire.models.hf import LoadedModel
from quire.plan.budget import MemoryPlan, format_bytes
from quire.plan.hisparse import HiSparseCosts, hisparse_gain
from quire.plan.host import largest_host_bytes
from quire.plan.plan import Plan
from quire.plan.planner import make_plan
from quire.scheduler.step import Step
from quire.sparse.coordinator import HiSparseCoordinator
from quire.spec.model import ModelSpec

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)


class HostedLatents(Part, ForwardPart):
    """The records of all latents, or of keys and values, the pool over them, and hot buffers on the device of `model`.

    Records are in `host`, if tiers have one, or else in memory that this object owns until `close`. Raises
    ModelCheckFailed if `model` computes something else there, HostMemoryError if the host has no room, and PlanError if
    the device has none.
    """

    def __init__(
        self, plan: MemoryPlan, model: LoadedModel, progress: Progress | None = None, *, host: HostPool | None = None
    ) -> None:
        assert plan.hot is not None
        device = model.device
        self.group, self._lossy = plan.hot.group, plan.hot.lossy
        if self._lossy:
            logger.warning(
                "--hisparse with page_bounds is lossy: a token of an output reads at most %d tokens before it, and "
                "outputs differ from those of full attention",
                plan.hot.top_k,
            )
        else:
            check_forward(model, plan.hot)
        self._owns, layout, group = host is None, plan.groups[self.group].layout, self.group
        if host is None:
            with alone_on_this_host():
                _check_room(plan, device)
                frames, group = plan.frames_of(self.group), 0
                pinned = device.type == "cuda"
                host = HostPool([plan.groups[self.group]], [frames], pinned=pinned, progress=progress)
        self.host = host
        try:
            self.pool = Pool(layout, rows=torch.from_numpy(self.host.payloads(group)), reader=device)
            self.coordinator = HiSparseCoordinator(plan, self.pool, device)
        except BaseException:
            self.host.close()
            raise

    def copy_by(self, moves: Moves) -> None:
        """Copy from host memory by `moves`, if these can read it where it is."""
        if self.coordinator.pool.device.type == "cpu" or self.host.pinned:
            self.coordinator.moves = moves

    def before_forward(self, step: Step, running: Any) -> None:
        self.coordinator.admit(step.batch.rows, step.batch.serials)

    def counters(self) -> list[Section]:
        counted = self.coordinator.counters()
        return [("hisparse", replace(counted, lossy=self._lossy, host_bytes=self.host.num_bytes))]

    def close(self) -> None:
        """Return its host memory to the system. A second call does nothing."""
        if self._owns:
            self.host.close()


def hot_buffer_parts(engine: EngineCore) -> Iterator[Part]:
    """The part for latents in host memory; none where they are on the device."""
    if engine.latents is not None:
        engine.latents.copy_by(engine.backend.moves)
        yield engine.latents


def hosted_latents(
    plan: MemoryPlan, model: LoadedModel, progress: Progress | None, host: HostPool | None
) -> tuple[HostedLatents, ...]:
    """What is in host memory beside hot buffers; empty if all frames are on the device. Raises as `HostedLatents`."""
    if plan.hot is None:
        return ()
    return (HostedLatents(plan, model, progress, host=host),)


def check_loss(plan: Plan, model: LoadedModel) -> None:
    """Refuse a lossy plan for a model with attention of its own, and warn as `warn_of_loss` does."""
    if plan.memory.hot is not None and plan.memory.hot.lossy:
        model.refuse_own_attention()
    warn_of_loss(plan, model.spec)


def warn_of_loss(plan: Plan, spec: ModelSpec) -> None:
    """Log why the plan's latents, or keys and values, in host memory do not pay, as far as that is known without
    measured speeds. `spec` is the model's."""
    hot = plan.memory.hot
    if hot is None:
        return
    gain = hisparse_gain(plan, partial(make_plan, spec), HiSparseCosts())
    if gain.loses:
        logger.warning("%s in host memory (--hisparse) do not pay here: %s", hot.contents, gain.loses)


def _check_room(plan: MemoryPlan, device: torch.device) -> None:
    assert plan.hot is not None
    memory = host_memory()
    on_host = plan.pool_bytes if device.type == "cpu" else 0
    most = max(0, largest_host_bytes(memory.available) - on_host)
    if plan.host_bytes > most:
        raise HostMemoryError(
            f"{plan.hot.contents} in host memory take {format_bytes(plan.host_bytes)}, and the host has room for "
            f"{format_bytes(most)}.",
            fix="lower host_to_device_ratio of --hisparse, or --kv-memory.",
        )
