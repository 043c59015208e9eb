"""Arena: the ids of two groups whose frames share one range of bytes (`quire.spec.arena`). Bookkeeping on the host.

Each group takes the free ids nearest to its own end, so frames of the two meet nowhere but in the gap between. Where
the gap is too small for a group and the other has free ids further in, the other retreats: its outermost frames get
ids further in, and their owner copies the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.memory.allocator.id_pool import IdPool
from quire.memory.runs import IdArray
from quire.spec.arena import ArenaLayout
from quire.spec.ids import Ids

_SCANNED = 512  # places looked at together


@dataclass(frozen=True, slots=True)
class Move:
    """Frames of a group that get other ids, in order; `sources` ascend. Sources are free, targets allocated."""

    group: int
    sources: Ids
    targets: Ids


class EndPool(IdPool):
    """The ids of one group of an arena. A *place* is the distance from the group's end, from 0 on; a free id with the
    lowest place is allocated first. No place beyond the `extent` is in use. An allocation costs O(ids) and a look at
    the places between the first free one and the last that it takes."""

    def __init__(self, arena: Arena, group: int, *, name: str) -> None:
        self._arena = arena
        self._at = group
        self._last = arena.layout.last_id(group) if group == arena.layout.upper else 0
        self._used = np.zeros(arena.layout.most(group), dtype=np.bool_)
        super().__init__(arena.layout.last_id(group), "sorted", group=name, noun="frame")

    def clear(self) -> None:
        self._out = np.zeros(self.size + 1, dtype=np.bool_)
        self._used[:] = False
        self._num_used = self.extent = self._first_free = 0

    @property
    def num_free(self) -> int:
        """Ids that can be allocated as the other group lies, free ones and the gap."""
        return max(0, self._arena.reach_of(self._at) - self._num_used)

    @property
    def num_used(self) -> int:
        return self._num_used

    def set_aside(self, count: int) -> Ids:
        self.check_room(count)
        places = self._nearest(count)
        self._occupy(places)
        return self._ids(places)

    def put(self, ids: Ids) -> None:
        self._vacate(self._places(ids))

    def retreat(self, limit: int) -> tuple[Ids, Ids]:
        """Move the ids in use at places from `limit` on to free places before it, of which there are enough. Returns
        sources, ascending, and targets."""
        sources = limit + np.flatnonzero(self._used[limit : self.extent])
        targets = self._nearest(len(sources))
        assert not len(targets) or int(targets[-1]) < limit, "a retreat beyond its limit"
        old, new = self._ids(sources), self._ids(targets)
        assert np.count_nonzero(self._out[old]) == len(old), "an id that is set aside was moved"
        self._occupy(targets)
        self._vacate(sources)
        self._out[old], self._out[new] = False, True
        return old, new

    def places_of(self, ids: IdArray) -> int:
        """One more than the largest place of these ids in use; 0 of none."""
        return int(self._places(ids).max(initial=-1)) + 1

    def _places(self, ids: IdArray) -> IdArray:
        return self._last - ids if self._last else ids - 1

    def _ids(self, places: IdArray) -> Ids:
        """The ids at ascending places, ascending, so that neighbours are read as a run."""
        ids = (self._last - places)[::-1] if self._last else places + 1
        return ids.astype(np.int32)

    def _nearest(self, count: int) -> IdArray:
        """The lowest free places, ascending."""
        found: list[IdArray] = []
        at, left = self._first_free, count
        while left > 0 and at < self.extent:
            stop = min(at + max(_SCANNED, 2 * left), self.extent)
            some = at + np.flatnonzero(~self._used[at:stop])[:left]
            found.append(some)
            at, left = stop, left - len(some)
        beyond = max(at, self.extent)
        return np.concatenate([*found, np.arange(beyond, beyond + left)])

    def _occupy(self, places: IdArray) -> None:
        if not len(places):
            return
        self._used[places] = True
        self._num_used += len(places)
        self._first_free = int(places[-1]) + 1
        self.extent = max(self.extent, self._first_free)

    def _vacate(self, places: IdArray) -> None:
        if not len(places):
            return
        self._used[places] = False
        self._num_used -= len(places)
        self._first_free = min(self._first_free, int(places.min()))
        end = self.extent if int(places.max()) + 1 == self.extent else 0
        while end:
            start = max(0, end - _SCANNED)
            used = np.flatnonzero(self._used[start:end])
            self.extent = start + int(used[-1]) + 1 if len(used) else start
            end = 0 if len(used) else start


class Arena:
    """The pools of two groups, in the order of the layout. A group *reaches* as far as its places in use."""

    def __init__(self, layout: ArenaLayout, names: Sequence[str]) -> None:
        self.layout = layout
        self.pools = tuple(EndPool(self, group, name=name) for group, name in enumerate(names))

    def reach_of(self, group: int) -> int:
        """Places that a group may use as the other lies."""
        return self.layout.most(group, self.pools[1 - group].extent)

    def lack(self, counts: Sequence[int]) -> int:
        """Bytes that so many places of each group need beyond what there is; at most 0: they fit."""
        (one, other), (count, beside) = self.layout.strides, counts
        return one * count + other * beside - self.layout.room

    def extents_with(self, wanted: Sequence[int]) -> list[int]:
        """The extent of each pool once it has so many ids more and nothing has moved."""
        return [max(pool.extent, pool.num_used + n) for pool, n in zip(self.pools, wanted, strict=True)]

    def make_way(self, wanted: Sequence[int]) -> Move | None:
        """Let a group retreat, no further than necessary, until so many ids of each can be allocated. Returns what
        moves. The caller knows that they fit beside what must not move. As both lie their ids fit, so at most one of
        them has free places that it does not want."""
        extents = self.extents_with(wanted)
        lack = self.lack(extents)
        if lack <= 0:
            return None
        at = int(self.pools[1].extent > self.pools[1].num_used + wanted[1])
        sources, targets = self.pools[at].retreat(extents[at] - -(-lack // self.layout.strides[at]))
        return Move(at, sources, targets) if len(sources) else None
