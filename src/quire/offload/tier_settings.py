"""Settings of the tiers below the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from quire.tiers.break_even import BreakEven
from quire.tiers.mover import Mover
from quire.tiers.store_health import StoreHealth


class WritePolicy(StrEnum):
    """When a cached page is copied to the host."""

    THROUGH = "write_through"
    """As soon as it is cached, so that eviction from the device costs nothing."""
    SELECTIVE = "write_through_selective"
    """When a second request uses it, or when its request is preempted."""
    BACK = "write_back"
    """When it is evicted from the device: the two tiers together hold the most, and eviction waits for the copy. Groups
    that are read in part are copied when cached: their frames are small, and are evicted early."""


class PrefetchPolicy(StrEnum):
    """How long a request waits for pages that come from storage."""

    BREAK_EVEN = "break_even"
    """Until computing them would have been quicker, as measured."""
    BEST_EFFORT = "best_effort"
    """Not at all: a request uses the pages that have arrived when its turn comes."""
    WAIT_COMPLETE = "wait_complete"
    """Until all stored pages have arrived."""
    TIMEOUT = "timeout"
    """Up to `prefetch_seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """`host_frames` and `record_bytes` are by group. The engine closes `mover`, which has a store if `stores`; `health`
    follows its answers. `always` loads and fetches even when computing is quicker."""

    host_frames: tuple[int, ...]
    record_bytes: tuple[int, ...]
    mover: Mover
    break_even: BreakEven
    write: WritePolicy = WritePolicy.THROUGH
    always: bool = False
    stores: bool = False
    prefetch: PrefetchPolicy = PrefetchPolicy.BREAK_EVEN
    prefetch_seconds: float = 2.0
    health: StoreHealth = field(default_factory=StoreHealth)

    def num_bytes(self, counts: Iterable[int]) -> int:
        """Bytes of the records of so many frames, by group."""
        return sum(count * size for count, size in zip(counts, self.record_bytes, strict=True))
