"""Tiers of a replay: the cache's own, over simulated records, a store in a dictionary, and links that take time.

A simulated record holds prefix hashes, so that what returns from a tier is checked. It is shorter than a real one, and
movers and stores count the bytes of the real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from quire.cache import KVCache
from quire.memory.record import RecordFormat, Records
from quire.offload import offload_of
from quire.offload.tier_settings import TierSettings
from quire.plan.budget import MemoryPlan
from quire.plan.step_cost import CostModel
from quire.sim.clock import VirtualClock
from quire.sim.device import Frames
from quire.sim.settings import SimulatedTiers
from quire.sim.trace_request import Hashes
from quire.spec.ids import Ids
from quire.spec.record_size import HEADER_BYTES
from quire.tiers.break_even import BreakEven
from quire.tiers.prefill import PrefillPeers
from quire.tiers.store import Answer, Entry, Record, RecordViews, Store, StoreKey
from quire.tiers.transfer import LANES, Copies, Lane, Transfer
from quire.tiers.virtual_mover import VirtualMover

_LATENCY = {Lane.SAVE: 5e-5, Lane.LOAD: 5e-5, Lane.ARCHIVE: 2e-4, Lane.FETCH: 2e-4, Lane.LOOK: 5e-4}
"""Seconds before the first byte, and for a lookup in a store."""


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


class NoTiers:
    """The lower tiers of a replay on the device alone."""

    settings: TierSettings | None = None
    """For the cache."""

    load_cost = 0.0
    """What it takes to load a token, as a part of what it takes to compute one of a short prompt."""

    @property
    def next_end(self) -> float | None:
        """When the next transfer ends; None: none is in flight."""
        return None

    def end_of(self, transfer: Transfer) -> float:
        """When a transfer in flight will end."""
        return 0.0

    def attach(self, cache: KVCache) -> None:
        """The cache on these tiers was made."""

    @property
    def on_host(self) -> VirtualTiers:
        """These tiers. A replay on the device alone has none."""
        raise AssertionError("there is no host tier")

    def use(self) -> TierUse | None:
        """The results; None without lower tiers."""
        return None


class VirtualTiers(NoTiers):
    """The tiers of one replay. `settings` are for the cache; `frames`, by group, are those of the device if its
    contents are checked. `peers` compute prompts. A wait for bytes advances the clock."""

    def __init__(
        self,
        tiers: SimulatedTiers,
        plan: MemoryPlan,
        cost: CostModel,
        clock: VirtualClock,
        frames: list[Frames] | None,
        peers: PrefillPeers | None = None,
    ) -> None:
        record_bytes = tiers.record_bytes or tuple(g.layout.bytes_per_frame + HEADER_BYTES for g in plan.groups)
        host_frames = tiers.host_frames(plan, record_bytes)
        storage_tokens = tiers.storage_tokens or 0
        storage_pages = storage_tokens // plan.page_size
        store = SimulatedStore(storage_pages * sum(record_bytes)) if storage_pages else None
        host = 1e9 * tiers.host_bandwidth if tiers.host_bandwidth else cost.host_bandwidth
        storage = 1e9 * tiers.storage_bandwidth if tiers.storage_bandwidth else cost.storage_bandwidth
        self._sizes = {"host_tokens": max(host_frames) * plan.page_size, "storage_tokens": storage_tokens}
        self._bandwidths = host, storage
        self.load_cost = sum(record_bytes) / plan.page_size / host / cost.chunk_seconds(0, 1)
        self._changes: list[LinkChange] = []
        self._clock = clock
        self.copies = SimulatedCopies(frames, host_frames, record_bytes)
        self.mover = VirtualMover(
            self.copies,
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
            write=tiers.write_policy,
            always=tiers.load == "always",
            stores=store is not None,
            prefetch=tiers.prefetch,
            peers=peers,
        )

    @property
    def next_end(self) -> float | None:
        return self.mover.next_end

    def end_of(self, transfer: Transfer) -> float:
        return self.mover.end_of(transfer)

    def attach(self, cache: KVCache) -> None:
        tiers = offload_of(cache).tiers
        assert tiers is not None
        self._cache, self.tiering = cache, tiers

    @property
    def on_host(self) -> VirtualTiers:
        return self

    def use(self) -> TierUse:
        counters = self.tiering.counters
        counted = {each.name: getattr(counters, each.name) for each in fields(TierUse) if hasattr(counters, each.name)}
        rates = {lane.name: self.mover.rates[lane].per_second for lane in LANES if lane.carries}
        return TierUse(
            **self._sizes,
            host_bandwidth=self._bandwidths[0],
            storage_bandwidth=self._bandwidths[1],
            **counted,
            device_hit_tokens=self._cache.statistics().hit_tokens - counters.host_hit_tokens,
            measured={name: rate for name, rate in rates.items() if rate is not None},
            changes=tuple(self._changes),
            off={link.name: why for link in LANES if (why := self._break_even.why_off(link))},
        )

    def _changed(self, link: Lane, why: str) -> None:
        self._changes.append(LinkChange(time=self._clock.now, link=link.name, why=why))


def lower_tiers(
    tiers: SimulatedTiers | None,
    plan: MemoryPlan,
    cost: CostModel,
    clock: VirtualClock,
    frames: list[Frames] | None,
    peers: PrefillPeers | None,
) -> NoTiers:
    """The lower tiers of a replay with these settings, if any."""
    return NoTiers() if tiers is None else VirtualTiers(tiers, plan, cost, clock, frames, peers)


# -- records

_LAYOUT = bytes(16)  # one for all groups: their frames hold prefix hashes


class SimulatedCopies(Copies):
    """Copies between `frames` of a simulated device, by group, and `host_frames` records of each group, which have
    `record_bytes` on a real device. Without `frames`, in a replay without checks, records have a header only."""

    queues = False

    def __init__(
        self, frames: Sequence[Frames] | None, host_frames: Sequence[int], record_bytes: Sequence[int]
    ) -> None:
        self._frames = frames
        self._record_bytes = record_bytes
        slots = [0] * len(host_frames) if frames is None else [each.hashes.shape[1] for each in frames]
        self._formats = [RecordFormat(group, _LAYOUT, 8 * count) for group, count in enumerate(slots)]
        sizes = [record.num_bytes for record in self._formats]
        self._rows: list[Records] = [
            np.zeros((n + 1, size), np.uint8) for n, size in zip(host_frames, sizes, strict=True)
        ]
        self._hashes: list[Hashes] = [rows[:, HEADER_BYTES:].view(np.uint64) for rows in self._rows]

    @property
    def num_groups(self) -> int:
        """Groups of frames."""
        return len(self._rows)

    def bytes_of(self, group: int) -> int:
        return self._record_bytes[group]

    def rows(self, group: int) -> Records:
        """uint8 `[frames + 1, stride]`, where a stride is less than a record."""
        return self._rows[group]

    def to_host(self, group: int, device: Ids, host: Ids) -> None:
        if self._frames is not None:
            self._hashes[group][host] = self._frames[group].hashes[device]

    def to_device(self, group: int, device: Ids, host: Ids) -> None:
        if self._frames is not None:
            self._frames[group].hashes[device] = self._hashes[group][host]
            self._frames[group].update_digests(device)

    def seal(self, group: int, host: Ids, keys: Sequence[bytes]) -> None:
        self._formats[group].seal(self._rows[group], host, keys)

    def defects(self, group: int, host: Ids, keys: Sequence[bytes]) -> list[str]:
        return self._formats[group].defects(self._rows[group], host, keys)


class SimulatedStore(Store):
    """Stores records of at most `most_bytes` in a dictionary, and evicts the least recently used. A record counts with
    the bytes for which it was prepared. It answers RETRY only if `prepare` finds no room."""

    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = 0  # bytes of all records, prepared ones too
        self._most_bytes = most_bytes
        self._visible: dict[StoreKey, tuple[bytes, int]] = {}  # with its bytes; least recently used first
        self._prepared: dict[StoreKey, int] = {}
        self._taken: dict[StoreKey, Record] = {}

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        return [Answer.HIT if key in self._visible else Answer.MISS for key in keys]

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """HIT counts as a use, that of the first key as the latest."""
        answers = [self._prepare(key, size) for key, size in zip(keys, sizes, strict=True)]
        for key in reversed(keys):
            if key in self._visible:
                self._visible[key] = self._visible.pop(key)
        return answers

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        """Does not change the buffers until `complete`."""
        self._taken.update(zip(keys, records, strict=True))
        return [Answer.HIT] * len(keys)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        for key, good in zip(keys, ok, strict=True):
            size, record = self._prepared.pop(key), self._taken.pop(key, None)
            if good:
                assert record is not None, "a record was completed and never put"
                self._visible[key] = (bytes(RecordViews(record).join()), size)
            else:
                self.num_bytes -= size
        return [Answer.HIT if good else Answer.MISS for good in ok]

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        """HIT counts as use."""
        answers = []
        for key, record in zip(keys, records, strict=True):
            found = self._visible.pop(key, None)
            if found is not None:
                self._visible[key] = found
                RecordViews(record).write(0, memoryview(found[0]))
            answers.append(Answer.MISS if found is None else Answer.HIT)
        return answers

    def remove(self, keys: Sequence[StoreKey]) -> int:
        return sum(map(self._remove, keys))

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        return iter([Entry(key, size) for key, (_, size) in self._visible.items() if scope in (None, key.scope)])

    def close(self) -> None:
        self.num_bytes -= sum(self._prepared.values())
        self._prepared.clear()
        self._taken.clear()

    def _prepare(self, key: StoreKey, size: int) -> Answer:
        if key in self._visible:
            return Answer.HIT
        if key in self._prepared:
            return Answer.PENDING
        while self._visible and self.num_bytes + size > self._most_bytes:
            self._remove(next(iter(self._visible)))
        if self.num_bytes + size > self._most_bytes:
            return Answer.RETRY
        self._prepared[key] = size
        self.num_bytes += size
        return Answer.MISS

    def _remove(self, key: StoreKey) -> bool:
        found = self._visible.pop(key, None)
        if found is not None:
            self.num_bytes -= found[1]
        return found is not None
