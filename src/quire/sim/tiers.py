"""Tiers of a replay: the real ones, over simulated records, a store in a dictionary, and lanes that take time."""

from __future__ import annotations

from dataclasses import dataclass

from quire.cache import KVCache
from quire.errors import InvalidInput
from quire.offload import offload_of
from quire.offload.tier_settings import PrefetchPolicy, TierSettings, WritePolicy
from quire.plan.budget import MemoryPlan, format_bytes
from quire.sim.clock import CostModel, VirtualClock
from quire.sim.device import Frames
from quire.sim.records import SimulatedCopies, SimulatedStore
from quire.sim.virtual_mover import VirtualMover
from quire.spec.record_size import HEADER_BYTES
from quire.tiers.break_even import BreakEven
from quire.tiers.transfer import LANES, Lane

_LATENCY = {Lane.SAVE: 5e-5, Lane.LOAD: 5e-5, Lane.ARCHIVE: 2e-4, Lane.FETCH: 2e-4, Lane.LOOK: 5e-4}
"""Seconds before the first byte, and for a lookup in a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTiers:
    """The tiers of a replay, and how they are used (`quire.offload.tier_settings`).

    The host holds `host_tokens` tokens, or the records that fit in `host_bytes`; storage holds `storage_tokens`, none
    by default. Bandwidths are bytes per second, 0 for those of the cost model. `record_bytes` has the bytes of a record
    of each group, by default those of the plan's layouts; `always` loads even if computing is faster.
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
        """Host frames of each group, in the device's proportions. Raises InvalidInput if they would hold no page."""
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
    """A lane turned itself off at `time` of the virtual clock, and `why`; or on again, if that is empty."""

    time: float
    link: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """The results of the tiers of a replay. Prompt tokens are hit on the device, or after a load from the host; those
    that the host had fetched from storage are in `storage_hit_tokens` too. `declined_tokens` were on lower tiers and
    were computed again, because that was faster. `measured` has bytes per second by lane, `off` why lanes are off at
    the end.
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
    """The tiers of one replay. `settings` are for the cache; `frames`, by group, are those of the device if its
    contents are checked. A wait for bytes advances the clock."""

    def __init__(
        self,
        tiers: SimulatedTiers,
        plan: MemoryPlan,
        cost: CostModel,
        clock: VirtualClock,
        frames: list[Frames] | None,
    ) -> None:
        record_bytes = tiers.record_bytes or tuple(g.layout.bytes_per_frame + HEADER_BYTES for g in plan.groups)
        host_frames = tiers.host_frames(plan, record_bytes)
        storage_pages = tiers.storage_tokens // plan.page_size
        store = SimulatedStore(storage_pages * sum(record_bytes)) if storage_pages else None
        host, storage = tiers.host_bandwidth or cost.host_bandwidth, tiers.storage_bandwidth or cost.storage_bandwidth
        self._sizes = {"host_tokens": max(host_frames) * plan.page_size, "storage_tokens": tiers.storage_tokens}
        self._bandwidths = host, storage
        self._changes: list[LinkChange] = []
        self._clock = clock
        self.mover = VirtualMover(
            SimulatedCopies(frames, host_frames, record_bytes),
            store,
            seconds=lambda: clock.now,
            bandwidths={Lane.SAVE: host, Lane.LOAD: host, Lane.ARCHIVE: storage, Lane.FETCH: storage},
            latency=_LATENCY,
            pass_until=clock.move_to,
        )
        self._break_even = BreakEven(lambda: clock.now, on_change=self._changed)
        self.settings = TierSettings(
            host_frames=host_frames,
            record_bytes=record_bytes,
            mover=self.mover,
            break_even=self._break_even,
            write=tiers.write,
            always=tiers.always,
            stores=store is not None,
            prefetch=tiers.prefetch,
        )

    def use(self, cache: KVCache) -> TierUse:
        """The results for this cache."""
        tiers = offload_of(cache).tiers
        assert tiers is not None
        counters = tiers.counters
        same = (
            "host_hit_tokens", "storage_hit_tokens", "declined_tokens", "saved_bytes", "loaded_bytes", "archived_bytes",
            "fetched_bytes", "refused_moves", "unsaved_frames", "unstored_frames",
        )  # fmt: skip
        rates = {lane.name: self.mover.rates[lane].per_second for lane in LANES if lane.carries}
        return TierUse(
            **self._sizes,
            host_bandwidth=self._bandwidths[0],
            storage_bandwidth=self._bandwidths[1],
            **{name: getattr(counters, name) for name in same},
            device_hit_tokens=cache.statistics().hit_tokens - counters.host_hit_tokens,
            measured={name: rate for name, rate in rates.items() if rate is not None},
            changes=tuple(self._changes),
            off={link.name: why for link in LANES if (why := self._break_even.why_off(link))},
        )

    def _changed(self, link: Lane, why: str) -> None:
        self._changes.append(LinkChange(time=self._clock.now, link=link.name, why=why))
