"""VirtualBuffers: the hot buffers of a replay with latents in host memory, and what steps wait for because of them.

Selections are drawn or recorded. They go through the production bookkeeping (`HotSlots`), for one index of the model;
all indexes are taken to be alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.errors import InvalidInput, PlanError
from quire.plan.budget import MemoryPlan
from quire.plan.hisparse import HiSparseCosts
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.plan.step_cost import CostModel
from quire.scheduler.step import Step
from quire.sim.selections import (
    DriftingSelections,
    HotHits,
    RecordedSelections,
    SelectionRecorder,
    Selections,
    optimal_hits,
)
from quire.sparse.hot_slots import HotSlots
from quire.spec.hisparse import HiSparseConfig, HotBuffers
from quire.spec.layers import INDEX_KEYS
from quire.spec.model import ModelSpec

_MOST_RECORDED = 2**25  # selected tokens of a replay whose optimum is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedHiSparse:
    """Latents in host memory, with selections of the file `source`, or drawn with `drift` from `seed`.

    `link_rate` is the bytes per second from host memory to a rank; 0: those of the cost model. Each of `ranks` copies
    all latents.
    """

    config: HiSparseConfig
    drift: float = 0.95
    selections: Selections | None = None
    source: str = ""
    link_rate: float = 0.0
    ranks: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HiSparseUse:
    """Hot buffers of a replay beside one with all latents on the device, in the same bytes (`resident_...`).

    `hit_rate` is the share of selected tokens that a buffer had, `optimal_hit_rate` Belady's for the same selections
    (None: too many to compute). Bytes and seconds per step are those of steps that decode, on one rank; seconds include
    the bookkeeping. Prompts read `prompt_bytes` from host memory in all. `loses` says why it is not worth it.
    """

    source: str
    device_buffer_size: int
    top_k: int
    device_bytes: int
    host_bytes: int
    tokens: int
    hit_rate: float
    optimal_hit_rate: float | None
    swapped_bytes_per_step: float
    swap_s_per_step: float
    prompt_bytes: int
    resident_tokens: int = 0
    resident_most_running: int = 0
    resident_mean_running: float = 0.0
    loses: str = ""


class VirtualBuffers:
    """The hot buffers of all cache rows of `plan`. Raises InvalidInput for recorded selections of another size."""

    def __init__(self, settings: SimulatedHiSparse, plan: MemoryPlan, cost: CostModel) -> None:
        hot = plan.hot
        assert hot is not None
        self._settings, self._plan, self._hot = settings, plan, hot
        self._selects: DriftingSelections | RecordedSelections
        if settings.selections is None:
            self._selects = DriftingSelections(
                settings.drift, num_rows=plan.max_requests, context=plan.context, top_k=hot.top_k, seed=settings.seed
            )
        else:
            _check_recorded(settings.source, settings.selections, hot)
            self._selects = RecordedSelections(settings.selections, num_rows=plan.max_requests)
        self._slots = SelectionRecorder(HotSlots(1, plan.max_requests, hot.buffer_size), limit=_MOST_RECORDED)
        self._serials = np.zeros(plan.max_requests, dtype=np.int64)
        self._token_bytes = plan.groups[hot.group].layout.bytes_per_token
        self._link_rate = settings.link_rate or cost.host_bandwidth / settings.ranks
        owned = [field for group in plan.groups for field in group.layout.fields if field.name == INDEX_KEYS]
        self._bookkeeping_s = HiSparseCosts().bookkeeping_s * sum(len(field.layers) for field in owned)
        self._steps = self._prompt_bytes = 0
        self._swap_s = 0.0

    def seconds(self, step: Step) -> float:
        """What a step waits for: tokens that decoding requests swap in, and their bookkeeping; and the latents before a
        chunk of a prompt, which are read from host memory once."""
        batch, singles = step.batch, step.ends - step.starts == 1
        changed = batch.rows[self._serials[batch.rows] != batch.serials]
        if len(changed):
            self._selects.begin(changed.astype(np.int32))
            self._slots.clear(changed.astype(np.int32))
            self._serials[batch.rows] = batch.serials
        read = int(step.starts[~singles].sum() * self._token_bytes)
        self._prompt_bytes += read
        found = read / self._link_rate
        if singles.any():
            rows, before = batch.rows[singles].astype(np.int32), self._slots.swapped_tokens
            self._slots.swap_in(0, rows, *self._selects.select(rows, step.ends[singles].astype(np.int64)))
            swapped = (self._slots.swapped_tokens - before) * self._token_bytes
            swap_s = swapped / self._link_rate + self._bookkeeping_s * len(rows)
            self._steps += 1
            self._swap_s += swap_s
            found += swap_s
        return found

    def use(self) -> HiSparseUse:
        """The results so far, without those of resident latents."""
        plan, hot, slots, steps = self._plan, self._hot, self._slots, max(1, self._steps)
        best = optimal_hits(slots.selections(), hot.buffer_size).rate if slots.is_complete else None
        return HiSparseUse(
            source=self._settings.source or f"drift {self._settings.drift:g}",
            device_buffer_size=hot.buffer_size,
            top_k=hot.top_k,
            device_bytes=plan.pool_bytes,
            host_bytes=plan.host_bytes,
            tokens=plan.num_tokens,
            hit_rate=HotHits(slots.hit_tokens, slots.swapped_tokens).rate,
            optimal_hit_rate=best,
            swapped_bytes_per_step=float(slots.swapped_tokens * self._token_bytes / steps),
            swap_s_per_step=self._swap_s / steps,
            prompt_bytes=self._prompt_bytes,
        )


def virtual_buffers(settings: SimulatedHiSparse | None, plan: MemoryPlan, cost: CostModel) -> Sequence[VirtualBuffers]:
    """The hot buffers of a replay, if it has any."""
    return () if settings is None else (VirtualBuffers(settings, plan, cost),)


def _check_recorded(source: str, recorded: Selections, hot: HotBuffers) -> None:
    count, width = recorded.positions.shape
    if not count:
        raise InvalidInput(f"{source} has no rows.", fix="record with more --max-tokens.")
    if width != hot.top_k:
        raise InvalidInput(
            f"{source} has selections of {width:,} tokens, and the model selects {hot.top_k:,}.",
            fix="record them with this model, or leave --selections out.",
        )
    if width > hot.buffer_size:
        raise InvalidInput(
            f"{source} has selections of {width:,} tokens, and a buffer has {hot.buffer_size:,}.",
            fix="replay longer requests, or leave --selections out.",
        )


def in_bytes_of(
    plan: MemoryPlan, spec: ModelSpec, settings: PlanSettings, hisparse: HiSparseConfig | None
) -> MemoryPlan:
    """Pools with latents in host memory, and hot buffers, in the device bytes of `plan`; without `hisparse`, that plan.
    Raises InvalidInput if these bytes have no room for a hot buffer."""
    if hisparse is None:
        return plan
    tokens = settings.max_total_tokens
    settings = settings.changed(kv_memory=plan.pool_bytes, max_total_tokens=None, hisparse=hisparse)
    try:
        return make_plan(spec, settings).memory
    except PlanError as error:
        raise InvalidInput(
            f"hisparse in the device bytes of {tokens:,} tokens: {error.message}",
            fix="raise --pool-tokens, or lower the device_buffer_size.",
        ) from None
