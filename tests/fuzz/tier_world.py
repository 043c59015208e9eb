"""TierWorld: what is below one fuzzed cache: host records, a store, a mover, and a clock. All of it drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.offload.tier_settings import TierSettings
from quire.plan.budget import MemoryPlan
from quire.settings.fields import PrefetchPolicy, WritePolicy
from quire.spec.events import Namespace
from quire.testing.choices import Choices
from quire.testing.stores import DictStore
from quire.tiers.break_even import BreakEven
from quire.tiers.store import StoreKey
from quire.tiers.transfer import LANES, Lane
from tests.fuzz.host_records import HostRecords
from tests.fuzz.names import Names
from tests.fuzz.page_keys import PageKeys
from tests.fuzz.tier_faults import WatchedStore
from tests.fuzz.watched_mover import Clock, WatchedMover

_MOST_HOST_FRAMES = 12
_BANDWIDTHS = (math.inf, 1e5, 1e3, 100.0)
_LATENCIES = (0.0, 0.0, 0.01, 1.0)


@dataclass(frozen=True, slots=True)
class TierAsk:
    """What a life should have below the device: whether a `storage` tier (None: drawn), and which `faults`; `spared`
    percent of all lives have none."""

    storage: bool | None = None
    faults: tuple[str, ...] = ()
    spared: int = 0


class TierWorld:
    """Of one life. `limited` says that the store forgets, so that what it lacks proves nothing. `flushes_in_flight`:
    the cache is flushed while transfers are in flight, and not cleared."""

    def __init__(self, plan: MemoryPlan, ask: TierAsk, choices: Choices) -> None:
        faults = () if choices.chance(ask.spared) else ask.faults
        self.faults = tuple(name for name in faults if len(faults) == 1 or choices.chance(60))
        self.clock = Clock()
        self.names = Names(plan.page_size)
        self.keys = PageKeys(self.names, [group.layout.fingerprint() for group in plan.groups])
        least = 1 if choices.chance(30) else _MOST_HOST_FRAMES // 2
        frames = tuple(choices.between(least, _MOST_HOST_FRAMES) for _ in plan.groups)
        hosted = plan.hot.group if plan.hot is not None else None
        frames = tuple(n + plan.num_pages if group == hosted else n for group, n in enumerate(frames))
        self.records = HostRecords(plan, self.keys, frames)
        stores = choices.chance(75) if ask.storage is None else ask.storage
        seed = choices.below(1 << 30)
        per_page = sum(self.records.bytes_of(group) for group in range(len(frames)))
        most = per_page * choices.between(1, 40)
        self.limited = "full-disk" in self.faults or choices.chance(25)
        self.medium = DictStore(most if self.limited else 1 << 30)
        percent = choices.one_of((5, 20, 50))
        self.store = WatchedStore(self.medium, self.keys, self.faults, seed=seed, percent=percent) if stores else None
        if self.store is not None:
            self.records.lied = self.store.lied
        slow = "slow-store" in self.faults
        drawn = Choices.seeded(seed)
        self.flushes_in_flight = seed % 4 == 3
        self.mover = WatchedMover(
            self.records,
            self.store,
            self.clock,
            bandwidths={link: 50.0 if slow and _stores(link) else choices.one_of(_BANDWIDTHS) for link in LANES},
            latency={link: 5.0 if slow and _stores(link) else choices.one_of(_LATENCIES) for link in LANES},
            choose=drawn.below if choices.chance(60) else None,
            most_bytes={link: per_page * choices.between(1, 8) for link in LANES} if choices.chance(30) else {},
            refuses=bool(self.faults),
            deadline_s=8.0 if slow and seed % 2 else None,
        )
        self.break_even = BreakEven(self.clock, losses=choices.between(1, 4), tiny_step=1)
        self.settings = TierSettings(
            host_frames=frames,
            record_bytes=tuple(self.records.bytes_of(group) for group in range(len(frames))),
            mover=self.mover,
            break_even=self.break_even,
            write=choices.one_of((*WritePolicy, WritePolicy.THROUGH)),
            always=choices.chance(50),
            stores=stores,
            prefetch=choices.one_of(tuple(PrefetchPolicy)),
            prefetch_seconds=choices.one_of((0.0, 0.5, 10.0)),
        )

    @property
    def is_faultless(self) -> bool:
        """Whether the store keeps what it was given."""
        return not self.faults and not self.limited

    def has_stored(self, end: int, namespace: Namespace, group: int) -> bool:
        """Whether the store has a group's record of the page whose last name is `end`."""
        if self.store is None or not self.keys.knows(end):
            return False
        return StoreKey(self.keys.scope(namespace), self.keys.key(end), group) in self.medium.visible

    def injected(self) -> dict[str, int]:
        """How often a fault happened that damages nothing; of one that is in all that happens, that it was there."""
        found = self.store.refusals() if self.store is not None else {}
        return found | {"slow-store": int("slow-store" in self.faults and self.store is not None)}

    def wrong(self) -> list[str]:
        """What must never have happened, and has."""
        return [*self.records.wrong, *self.mover.wrong, *(self.store.wrong if self.store is not None else ())]


def _stores(link: Lane) -> bool:
    return link in (Lane.ARCHIVE, Lane.FETCH, Lane.LOOK)
