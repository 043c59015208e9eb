"""Tiers of a replay: the cache's own, over simulated records, a store in a dictionary, and links that take time.

A simulated record holds prefix hashes, so that what returns from a tier is checked. It is shorter than a real one, and
movers and stores count the bytes of the real one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from typing_extensions import Buffer

from quire.cache import KVCache
from quire.memory.record import RecordFormat, Records
from quire.offload import offload_of
from quire.offload.tier_settings import TierSettings
from quire.plan.budget import MemoryPlan
from quire.plan.step_cost import CostModel
from quire.sim.clock import VirtualClock
from quire.sim.device import Frames
from quire.sim.tier_settings import SimulatedTiers
from quire.sim.trace_request import Hashes
from quire.spec.ids import Ids
from quire.spec.record_size import HEADER_BYTES
from quire.tiers.break_even import BreakEven
from quire.tiers.executor import TransferExecutor
from quire.tiers.mover import CLOSED, Mover
from quire.tiers.prefill import PrefillPeers
from quire.tiers.store import Answer, Entry, Store, StoreKey
from quire.tiers.transfer import LANES, Copies, Endpoint, Lane, Transfer


class VirtualMover(Mover):
    """For simulation and fuzzing: each lane runs one transfer after the other, at its bandwidth and latency.

    `seconds` is the clock. Bytes move when a transfer ends, as late as on a real device, or when a step waits for a
    layer. When a load begins, only its records are checked. A lane without a bandwidth needs no time for bytes, one
    without a latency starts at once; one with an infinite latency hangs. Lanes that write the same store or peer are
    one queue.

    `pass_until(time)`, if given, advances the clock to that time or later; the mover calls it to wait. Without it, a
    transfer that must be complete at once ends early, but its lane stays busy for the full time.

    With `choose`, which returns a number below its argument, due transfers end in the order that it picks, and some
    only at a later call. That is as between lanes of a real machine; one queue keeps its order.
    """

    def __init__(
        self,
        copies: Copies,
        store: Store | None,
        *,
        seconds: Callable[[], float],
        bandwidths: Mapping[Lane, float],
        latency: Mapping[Lane, float],
        lanes: Sequence[Lane] = LANES,
        choose: Callable[[int], int] | None = None,
        most_bytes: Mapping[Lane, int] | None = None,
        pass_until: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(lanes, most_bytes)
        self._executor = TransferExecutor(copies, store)
        self._seconds = seconds
        self._pass_until = pass_until
        self._bandwidths = bandwidths
        self._latency = latency
        self._choose = choose
        self._queues: dict[Lane | Endpoint, deque[_Queued]] = {lane.queue: deque() for lane in lanes}
        self._closed = False

    def submit(self, transfer: Transfer) -> bool:
        now = self._seconds()
        if self._closed or not self._take(transfer, now):
            return False
        queue = self._queues[transfer.lane.queue]
        transfer.pieces = self._executor.run(transfer)
        queue.append(_Queued(transfer, now))
        if len(queue) == 1:
            self._begin(queue[0])
        return True

    def finished(self) -> list[Transfer]:
        now = self._seconds()
        while due := [queue for queue in self._queues.values() if queue and self._end_of(queue[0], now) <= now]:
            if self._choose is None:
                queue = min(due, key=lambda queue: queue[0].end)
            else:
                picked = self._choose(len(due) + 1)
                if picked == len(due):
                    break
                queue = due[picked]
            self._finish(queue)
        for transfer in self._overdue(now):
            self._expire(transfer)
        return self._hand_back()

    def wait(self, seconds: float) -> bool:
        """Without `pass_until`, a caller without other work advances the clock to `next_end`."""
        next_end, until = self.next_end, self._seconds() + seconds
        if self._pass_until is not None and not self._has_news and not self._ended:
            self._pass_until(until if next_end is None else min(next_end, until))
        is_due = next_end is not None and next_end <= self._seconds()
        found = self._has_news or bool(self._ended) or is_due
        self._has_news = False
        return found

    def complete(self, transfer: Transfer) -> None:
        """Transfers before it in its queue end too."""
        if not transfer.done and self._pass_until is not None:
            self._pass_until(self.end_of(transfer))
        while not transfer.done:
            self._finish(self._queues[transfer.lane.queue])

    @property
    def next_end(self) -> float | None:
        """When the next transfer ends or expires. None: none is in flight, or all hang."""
        now = self._seconds()
        first = min((self._end_of(queue[0], now) for queue in self._queues.values() if queue), default=math.inf)
        if self._next_deadline < first:
            transfers = [queued.transfer for queue in self._queues.values() for queued in queue]
            deadlines = [transfer.expires_at for transfer in transfers if not transfer.expired]
            first = min(first, *deadlines, math.inf)
        return first if first < math.inf else None

    def end_of(self, transfer: Transfer) -> float:
        """When a transfer in flight will end, if those before it do not expire."""
        end = 0.0
        for queued in self._queues[transfer.lane.queue]:
            began = max(end, queued.submitted)
            end = queued.end if queued.begun else began + self._duration(queued.transfer)
            if queued.transfer is transfer:
                return end
        raise KeyError(transfer)

    def close(self) -> tuple[Transfer, ...]:
        self._closed = True
        for queue in self._queues.values():
            for queued in queue:
                queued.transfer.end(CLOSED)
                self._ended.append(queued.transfer)
            queue.clear()
        return ()

    def _duration(self, transfer: Transfer) -> float:
        lane = transfer.lane
        return self._latency.get(lane, 0.0) + transfer.num_bytes / self._bandwidths.get(lane, math.inf)

    def _begin(self, queued: _Queued, after: float = 0.0) -> None:
        transfer = queued.transfer
        queued.begun = True
        queued.began = max(after, queued.submitted)
        queued.end = queued.began + self._duration(transfer)
        if transfer.lane.is_remote or not transfer.lane.is_inward:
            return
        transfer.is_driven = True
        if transfer.advance():
            self._has_news = True
        else:
            queued.end = queued.began + self._latency.get(transfer.lane, 0.0)

    def _end_of(self, queued: _Queued, now: float) -> float:
        """When it ends. That is now for a stopped one, which keeps the pages that would have arrived by now."""
        transfer = queued.transfer
        may_stop = transfer.stopping and not transfer.expired and not queued.stopped
        if may_stop and transfer.lane.is_remote and transfer.lane.carries:
            queued.stopped = True
            transfer.kept_pages = sum(map(len, transfer.units))
            if now < queued.end:
                share = max(0.0, now - queued.began) / (queued.end - queued.began)
                transfer.kept_pages = int(share * max(map(len, transfer.units), default=0))
                queued.end = max(queued.began, now)
        return queued.end

    def _expire(self, transfer: Transfer) -> None:
        """A transfer whose deadline has passed ends if it waits in its queue. One that has begun continues, and may use
        its frames, until its own end."""
        queue = self._queues[transfer.lane.queue]
        queued = next(queued for queued in queue if queued.transfer is transfer)
        if queued.begun and queued.end <= transfer.expires_at:
            return  # the fetch ended in time, and `choose` did not pick the request yet
        self._has_news = True
        transfer.expire()
        if queued.begun:
            transfer.kept_pages = sum(map(len, transfer.units))
        else:
            queue.remove(queued)
            self._end(queued)

    def _finish(self, queue: deque[_Queued]) -> None:
        queued = queue[0]
        if queued.end > queued.transfer.expires_at and not queued.transfer.expired:
            self._expire(queued.transfer)
        while not queued.transfer.over:
            queued.transfer.advance()
        queue.popleft()
        queued.transfer.seconds = queued.end - queued.began
        self._end(queued)
        while queue and max(queued.end, queue[0].submitted) >= queue[0].transfer.expires_at:
            self._expire(queue[0].transfer)
        if queue:
            self._begin(queue[0], queued.end)

    def _end(self, queued: _Queued) -> None:
        queued.transfer.end()
        self._ended.append(queued.transfer)


class _Queued:
    """A transfer in its queue, with the times of its submission, begin and end."""

    def __init__(self, transfer: Transfer, submitted: float) -> None:
        self.transfer = transfer
        self.submitted = self.began = self.end = submitted
        self.begun = self.stopped = False


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

    @property
    def next_end(self) -> float | None:
        """When the next transfer ends; None: none is in flight."""
        return None

    def end_of(self, transfer: Transfer) -> float:
        """When a transfer in flight will end."""
        return 0.0

    def num_peer_hits(self, cache: KVCache) -> int:
        """Prompt tokens that peers have computed."""
        return 0

    def use(self, cache: KVCache) -> TierUse | None:
        """The results for this cache; None without lower tiers."""
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

    def num_peer_hits(self, cache: KVCache) -> int:
        tiers = offload_of(cache).tiers
        assert tiers is not None
        return tiers.counters.peer_hit_tokens

    def use(self, cache: KVCache) -> TierUse:
        tiers = offload_of(cache).tiers
        assert tiers is not None
        counters = tiers.counters
        counted = {each.name: getattr(counters, each.name) for each in fields(TierUse) if hasattr(counters, each.name)}
        rates = {lane.name: self.mover.rates[lane].per_second for lane in LANES if lane.carries}
        return TierUse(
            **self._sizes,
            host_bandwidth=self._bandwidths[0],
            storage_bandwidth=self._bandwidths[1],
            **counted,
            device_hit_tokens=cache.statistics().hit_tokens - counters.host_hit_tokens,
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

LAYER = 0
"""The one layer of simulated frames. `VirtualClock` estimates how long a step waits for layers."""

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

    def layers(self) -> tuple[int, ...]:
        return (LAYER,)

    def bytes_of(self, group: int) -> int:
        return self._record_bytes[group]

    def rows(self, group: int) -> Records:
        """uint8 `[frames + 1, stride]`, where a stride is less than a record."""
        return self._rows[group]

    def to_host(self, group: int, device: Ids, host: Ids) -> None:
        if self._frames is not None:
            self._hashes[group][host] = self._frames[group].hashes[device]

    def to_device(self, group: int, device: Ids, host: Ids, layer: int | None) -> None:
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
        self._taken: dict[StoreKey, Buffer] = {}

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        return [Answer.HIT if key in self._visible else Answer.MISS for key in keys]

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """HIT counts as a use, that of the first key as the latest."""
        answers = [self._prepare(key, size) for key, size in zip(keys, sizes, strict=True)]
        for key in reversed(keys):
            if key in self._visible:
                self._visible[key] = self._visible.pop(key)
        return answers

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Does not change the buffers until `complete`."""
        self._taken.update(zip(keys, records, strict=True))
        return [Answer.HIT] * len(keys)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        for key, good in zip(keys, ok, strict=True):
            size, record = self._prepared.pop(key), self._taken.pop(key, None)
            if good:
                assert record is not None, "a record was completed and never put"
                self._visible[key] = (bytes(record), size)
            else:
                self.num_bytes -= size
        return [Answer.HIT if good else Answer.MISS for good in ok]

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """HIT counts as use."""
        answers = []
        for key, record in zip(keys, records, strict=True):
            found = self._visible.pop(key, None)
            if found is not None:
                self._visible[key] = found
                memoryview(record)[:] = found[0]
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
