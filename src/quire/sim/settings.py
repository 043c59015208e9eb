"""Settings of a replay's tiers, links and engines. Nothing here loads the simulator."""

from __future__ import annotations

from bisect import bisect_right
from typing import ClassVar

from pydantic import model_validator

from quire.errors import InvalidInput
from quire.plan.budget import MemoryPlan, format_bytes
from quire.plan.host import frames_beside
from quire.settings.fields import TIERS, BusFields, LinkFields, TierFields, TransferFields
from quire.settings.setting import Settings, Tokens, setting


def _one_size() -> InvalidInput:
    return InvalidInput(
        "the size of the host tier is given twice or not at all.", fix="give it in tokens, or in bytes."
    )


class SimulatedTiers(BusFields, TierFields):
    """The tiers of a replay, and how they are used. The host holds `host_tokens` tokens, or the records that fit in
    `host_memory`; storage holds none by default."""

    GROUP: ClassVar[str] = TIERS

    host_tokens: Tokens | None = setting(
        None, "Tokens that host memory holds; everything is replayed without it and with it."
    )
    storage_tokens: Tokens | None = setting(None, "Tokens that storage behind it holds.")
    storage_bandwidth: float | None = setting(None, "GB/s each way.", otherwise="7", gt=0)
    record_bytes: tuple[int, ...] = setting(
        (), "Bytes of a record of each group; none: those of the plan's layouts.", option=None
    )

    @model_validator(mode="after")
    def _sizes_agree(self) -> SimulatedTiers:
        if self.host_tokens and self.host_memory:
            raise _one_size()
        if self.host_memory == "auto":
            raise InvalidInput("a simulated host has no size of its own.", fix="give --host-memory 64GiB, say.")
        return self

    @property
    def has_host(self) -> bool:
        """Whether a size is given."""
        return bool(self.host_tokens or self.host_memory)

    def host_frames(self, plan: MemoryPlan, record_bytes: tuple[int, ...]) -> tuple[int, ...]:
        """Host frames of each group, in an engine's proportions. Raises InvalidInput if they would hold no page."""
        if not self.has_host:
            raise _one_size()
        count = (self.host_tokens or 0) // plan.page_size
        if isinstance(num_bytes := self.host_memory, int):

            def size(count: int) -> int:
                return sum(n * each for n, each in zip(frames_beside(plan, count), record_bytes, strict=True))

            count = bisect_right(range(1, num_bytes), num_bytes, key=size)
        if count < 1:
            raise InvalidInput(
                f"the host tier holds no page: one takes {plan.page_size} tokens, {format_bytes(sum(record_bytes))}.",
                fix="give it more.",
            )
        return frames_beside(plan, count)


class SimulatedLink(TransferFields, LinkFields):
    """How pages and messages travel between engines: out of each prefill engine and into each decode engine."""

    GROUP: ClassVar[str] = "Roles"

    link_failures: float = setting(
        0.0, "The chance of a write, of 8 MiB at most, to fail; drawn from --seed.", ge=0, le=1
    )
    latency: float = setting(2e-4, "Seconds that a message takes.", option=None)
    least_tokens: int = setting(128, "Prompts that lack fewer tokens are computed by the decode engine.", option=None)
    failure_seed: int = setting(0, "Seed of failures.", option=None)


class Fleet(Settings):
    """Engines behind a router."""

    GROUP: ClassVar[str] = "Engines behind a router"

    num_replicas: int = setting(1, "Engines behind a router.", option="--replicas", ge=1)
    event_delay: float = setting(0.0, "Seconds until the router is told what an engine has stored and removed.", ge=0)
    event_loss: float = setting(
        0.0, "The chance of a message with such events to be lost; drawn from --seed.", ge=0, lt=1
    )
    restart_every: float | None = setting(
        None, "Each so many seconds the next engine in turn restarts, and its cache is empty.", otherwise="never", gt=0
    )
    flush_every: float | None = setting(
        None, "Each so many seconds all caches are flushed, as new weights do it.", otherwise="never", gt=0
    )
    loss_seed: int = setting(0, "Seed of losses.", option=None)
