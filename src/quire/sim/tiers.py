"""Tiers of a replay: the cache's own, over records of names, a store in a dictionary, and links that take time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.cache import KVCache
from quire.errors import InvalidInput
from quire.offload import offload_of
from quire.offload.tier_settings import PrefetchPolicy, TierSettings, WritePolicy
from quire.plan.budget import MemoryPlan, format_bytes
from quire.sim.clock import CostModel, VirtualClock
from quire.sim.copies import SimulatedCopies
from quire.sim.device import Frames
from quire.sim.store import SimulatedStore
from quire.sim.virtual_mover import VirtualMover
from quire.spec.record_size import HEADER_BYTES
from quire.tiers.break_even import BreakEven
from quire.tiers.transfer import LANES, Lane

_LATENCY = {Lane.SAVE: 5e-5, Lane.LOAD: 5e-5, Lane.ARCHIVE: 2e-4, Lane.FETCH: 2e-4, Lane.LOOK: 5e-4}
"""Seconds before the first byte, and of a look at what a store has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTiers:
    """What is below the device of a replay, and how it is used (`quire.offload.tier_settings`).

    The host holds `host_tokens` tokens, or the records that `host_bytes` bytes do; storage `storage_tokens`, none at
    all by default. Bandwidths are bytes per second, 0 for those of the cost model. `record_bytes` has the bytes of a
    record of each group, by default what the plan's layouts take; `always` uses what the tiers have without asking
    whether that is quicker.
    """

    host_tokens: int = 0
    host_bytes: int = 0
    storage_tokens: int = 0
    host_bandwidth: float = 0.0
    storage_bandwidth: float = 0.0
    write: WritePolicy = WritePolicy.THROUGH
    prefetch: PrefetchPolicy = PrefetchPolicy.BREAK_EVEN
    always: bool = False
    record_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.host_tokens > 0) == (self.host_bytes > 0):
            raise InvalidInput(
                "the size of the host tier is given twice or not at all.", fix="give it in tokens, or in bytes."
            )
        if min(self.host_tokens, self.host_bytes, self.storage_tokens) < 0:
            raise InvalidInput("a tier cannot hold less than nothing.", fix="give sizes above zero.")
        if min(self.host_bandwidth, self.storage_bandwidth) < 0:
            raise InvalidInput("a bandwidth below zero.", fix="give bytes per second above zero.")

    def host_frames(self, plan: MemoryPlan, record_bytes: tuple[int, ...]) -> tuple[int, ...]:
        """Host frames of each group, in the device's proportions. Raises InvalidInput where they would hold no page."""
        on_device = [plan.frames_of(index) for index in range(len(plan.groups))]
        largest = max(on_device)
        count = self.host_tokens // plan.page_size
        if self.host_bytes:
            each = sum(frames * size for frames, size in zip(on_device, record_bytes, strict=True)) / largest
            count = int(self.host_bytes / each)
        if count < 1:
            raise InvalidInput(
                f"the host tier holds no page: one takes {plan.page_size} tokens, {format_bytes(sum(record_bytes))}.",
                fix="give it more.",
            )
        return tuple(max(1, count * frames // largest) for frames in on_device)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """A link turned itself off at `time` of the virtual clock, and `why`; or on again, where that is empty."""

    time: float
    link: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """What the tiers of a replay did. Prompt tokens are hit on the device, or thanks to a load from the host; what had
    come there from storage is counted in `storage_hit_tokens` too. Those declined were there and were computed
    again, because that was quicker. `measured` has bytes per second by link, `off` why links are off at the end.
    """

    host_tokens: int
    storage_tokens: int
    host_bandwidth: float
    storage_bandwidth: float
    device_hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    declined_tokens: int
    saved_bytes: int
    loaded_bytes: int
    archived_bytes: int
    fetched_bytes: int
    refused_moves: int
    unsaved_frames: int
    unstored_frames: int
    measured: dict[str, float]
    changes: tuple[LinkChange, ...]
    off: dict[str, str]


class VirtualTiers:
    """The tiers of one replay. `settings` are for the cache; `frames`, by group, are those of the device where its
    contents are checked. Whoever waits for bytes moves the clock."""

    def __init__(
        self,
        wanted: SimulatedTiers,
        plan: MemoryPlan,
        cost: CostModel,
        clock: VirtualClock,
        frames: list[Frames] | None,
    ) -> None:
        record_bytes = wanted.record_bytes or tuple(g.layout.bytes_per_frame + HEADER_BYTES for g in plan.groups)
        host_frames = wanted.host_frames(plan, record_bytes)
        storage_pages = wanted.storage_tokens // plan.page_size
        self.changes: list[LinkChange] = []
        self._wanted = wanted
        self._clock = clock
        self._host_tokens = max(host_frames) * plan.page_size
        self._host_bandwidth = wanted.host_bandwidth or cost.host_bandwidth
        self._storage_bandwidth = wanted.storage_bandwidth or cost.storage_bandwidth
        self.store = SimulatedStore(storage_pages * sum(record_bytes)) if storage_pages else None
        self.mover = VirtualMover(
            SimulatedCopies(frames, host_frames, record_bytes),
            self.store,
            seconds=lambda: clock.now,
            bandwidths={
                Lane.SAVE: self._host_bandwidth,
                Lane.LOAD: self._host_bandwidth,
                Lane.ARCHIVE: self._storage_bandwidth,
                Lane.FETCH: self._storage_bandwidth,
            },
            latency=_LATENCY,
            pass_until=clock.move_to,
        )
        self.break_even = BreakEven(lambda: clock.now, on_change=self._changed)
        self.settings = TierSettings(
            host_frames=host_frames,
            record_bytes=record_bytes,
            mover=self.mover,
            break_even=self.break_even,
            write=wanted.write,
            always=wanted.always,
            stores=self.store is not None,
            prefetch=wanted.prefetch,
        )

    def use(self, cache: KVCache) -> TierUse:
        """What they did for this cache."""
        tiers = offload_of(cache).tiers
        assert tiers is not None
        counters: dict[str, Any] = tiers.statistics()
        same = (
            "host_hit_tokens", "storage_hit_tokens", "declined_tokens", "saved_bytes", "loaded_bytes", "archived_bytes",
            "fetched_bytes", "refused_moves", "unsaved_frames", "unstored_frames",
        )  # fmt: skip
        rates = {lane.name: self.mover.rate(lane).per_second for lane in LANES if lane.carries}
        return TierUse(
            **{name: counters[name] for name in same},
            host_tokens=self._host_tokens,
            storage_tokens=self._wanted.storage_tokens,
            host_bandwidth=self._host_bandwidth,
            storage_bandwidth=self._storage_bandwidth,
            device_hit_tokens=cache.statistics().hit_tokens - counters["host_hit_tokens"],
            measured={name: rate for name, rate in rates.items() if rate is not None},
            changes=tuple(self.changes),
            off={link.name: why for link in LANES if (why := self.break_even.why_off(link))},
        )

    def _changed(self, link: Lane, why: str) -> None:
        self.changes.append(LinkChange(time=self._clock.now, link=link.name, why=why))
