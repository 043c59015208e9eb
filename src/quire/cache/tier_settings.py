"""What a cache is told of the tiers below the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from quire.plan.budget import MemoryPlan
from quire.tiers.break_even import BreakEven
from quire.tiers.mover import Mover


class WritePolicy(StrEnum):
    """When a cached page is copied to the host."""

    THROUGH = "write_through"
    """As soon as it is cached, so that leaving the device costs nothing."""
    SELECTIVE = "write_through_selective"
    """When a second request uses it, or when its request is preempted."""
    BACK = "write_back"
    """When it has to leave the device: the two tiers together hold the most, and eviction waits for the copy. What is
    read in part only is small, leaves the device early, and is copied as soon as it is cached."""


class PrefetchPolicy(StrEnum):
    """How long a request waits for pages that come from storage."""

    BREAK_EVEN = "break_even"
    """Until computing them would have been quicker, as measured."""
    BEST_EFFORT = "best_effort"
    """Not at all: what has come when its turn comes is used."""
    WAIT_COMPLETE = "wait_complete"
    """Until all that is stored has come."""
    TIMEOUT = "timeout"
    """So many seconds and no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """`host_frames` and bytes of a record, both by group; `mover` moves bytes and is the engine's to close; with
    `stores`, it has a store. `always` uses what the tiers have without asking whether it is quicker. Of a group's
    device frames, one in `saving_share` may be on its way to the host before it has to go."""

    host_frames: tuple[int, ...]
    record_bytes: tuple[int, ...]
    mover: Mover
    break_even: BreakEven
    write: WritePolicy = WritePolicy.THROUGH
    always: bool = False
    stores: bool = False
    prefetch: PrefetchPolicy = PrefetchPolicy.BREAK_EVEN
    prefetch_seconds: float = 2.0
    saving_share: int = 16

    def num_pages(self, plan: MemoryPlan) -> int:
        """Ids for pages that are on the host only."""
        whole = [
            count for count, group in zip(self.host_frames, plan.groups, strict=True) if group.reach.kind == "full"
        ]
        return max(whole or self.host_frames)
