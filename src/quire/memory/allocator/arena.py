"""Arena: the ids of two groups whose frames share one range of bytes (`quire.spec.arena`). Bookkeeping on the host.

Each group takes the free ids nearest to its own end, so frames of the two meet nowhere but in the gap between. Where
the gap is too small for a group and the other has free ids further in, the other retreats: its outermost frames get
ids further in, and their owner copies the bytes. A frame that must not be used again is a *hole* in the places of both
groups: each takes those around it. The limit of the upper ids is the size of the arena: the memory beyond can be given
back.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
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
    """Frames of a group that get other ids, in order; `sources` ascend. All `targets` are free until `moved`."""

    group: int
    sources: Ids
    targets: Ids


class EndPool(IdPool):
    """The ids of one group of an arena. A *place* is the distance from the group's end, from 0 on; a free id with the
    lowest place is allocated first, but for the first `num_closed` places, whose ids are beyond the limit. No place
    beyond the `extent` is in use, but for holes. An allocation costs O(ids) and a look at the places between the first
    free one and the last that it takes."""

    num_used = 0

    def __init__(self, arena: Arena, group: int, *, name: str) -> None:
        self._arena = arena
        self._at = group
        self._last = arena.layout.last_id(group) if group == arena.layout.upper else 0
        super().__init__(arena.layout.last_id(group), "sorted", group=name, noun="frame")

    def clear(self) -> None:
        self._out, most = np.zeros(self.size + 1, dtype=np.bool_), self._arena.layout.most(self._at)
        self._used, self._over = np.zeros(most, dtype=np.bool_), np.zeros(most, dtype=np.int16)
        self._holes: list[int] = []  # places of which holes have bytes, ascending; `_over` has how many holes, by place
        self.num_used = self.extent = self._first_free = 0
        self.num_apart = 0  # ids in use that are holes

    @property
    def num_free(self) -> int:
        """Ids that can be allocated as the other group lies, free ones and the gap, beside those beyond the limit."""
        return max(0, self.ids_in(self._arena.reach_of(self._at)) - self.num_live)

    @property
    def num_live(self) -> int:
        """Ids in use that are no holes."""
        return self.num_used - self.num_apart

    @property
    def num_closed(self) -> int:
        """The first places, which are not used."""
        return self.size - self.limit

    @property
    def num_beyond(self) -> int:
        return int(np.count_nonzero(self._used[: self.num_closed]))

    @property
    def num_withdrawn(self) -> int:
        return self.num_closed - self.num_beyond

    def places_for(self, count: int) -> int:
        """The first places of which so many are open, and no holes."""
        count += self.num_closed
        for hole in self._holes:
            if hole >= count:
                break
            count += hole >= self.num_closed
        return count

    def ids_in(self, places: int) -> int:
        """Ids at so many places, without holes and closed ones."""
        holes, closed = self._holes, self.num_closed
        return places - closed - bisect_left(holes, places) + bisect_left(holes, closed)

    def set_aside(self, count: int) -> Ids:
        self.check_room(count)
        places = self._nearest(count)
        self._occupy(places)
        return self._ids(places)

    def put(self, ids: Ids) -> None:
        self._vacate(self._places(ids))

    def resize(self, limit: int) -> None:
        assert self.size - len(self._used) <= limit <= self.size, "a limit outside the arena"
        self.limit, self._first_free = limit, 0

    def retreat(self, places: int, fixed: IdArray | Sequence[int], most: int) -> tuple[Ids, Ids]:
        """The ids in use after so many places, at most `most` of them, the outermost, but those in `fixed`; and free
        ones before, of which there are enough. Both ascend."""
        if places >= self.extent:
            return (nothing := np.empty(0, dtype=np.int32)), nothing
        sources = places + np.flatnonzero(self._used[places : self.extent] & (self._over[places : self.extent] == 0))
        if len(fixed):
            sources = sources[~np.isin(self._last - sources if self._last else sources + 1, fixed)]
        targets = self._nearest(len(sources := sources[-most:]))
        assert not len(targets) or int(targets[-1]) < places, "a retreat beyond its limit"
        return self._ids(sources), self._ids(targets)

    def set_apart(self, at: int) -> None:
        self._arena.change_hole(self._at, at, 1)

    def use_again(self, at: int) -> None:
        self._arena.change_hole(self._at, at, -1)

    def moved(self, sources: Ids, targets: Ids) -> None:
        """Ids `targets`, which were free, are allocated instead of `sources`."""
        assert np.count_nonzero(self._out[sources]) == len(sources), "an id that is set aside was moved"
        first = self._first_free
        self._occupy(np.sort(self._places(targets)))
        self._first_free = first
        self._vacate(self._places(sources))
        self._out[sources], self._out[targets] = False, True

    def _next_free(self, most: int) -> Ids:
        return self._ids(self._nearest(most))  # ids in use fit below the limit

    def set_over(self, ids: IdArray, change: int) -> None:
        """One hole more, or one less, has bytes of each of these ids."""
        places = self._places(ids)
        places = places[places < len(self._over)]  # a frame that has bytes of the other's padding is never used
        self._over[places] += change
        self._holes = np.flatnonzero(self._over).tolist()
        self._first_free = min(self._first_free, int(places.min(initial=self._first_free)))
        self.extent = max(self.extent, int(places.max(initial=-1)) + 1)
        self._shrink()

    def places_of(self, ids: IdArray) -> int:
        """One more than the largest place of these ids in use; 0 of none."""
        return int(self._places(ids).max()) + 1 if len(ids) else 0

    def _places(self, ids: IdArray) -> IdArray:
        return self._last - ids if self._last else ids - 1

    def _ids(self, places: IdArray) -> Ids:
        """The ids at ascending places, ascending, so that neighbours are read as a run."""
        ids = (self._last - places)[::-1] if self._last else places + 1
        return ids.astype(np.int32)

    def _nearest(self, count: int) -> IdArray:
        """The lowest free places, ascending."""
        found: list[IdArray] = []
        at, left = max(self._first_free, self.num_closed), count
        while left > 0 and at < self.extent:
            stop = min(at + max(_SCANNED, 2 * left), self.extent)
            some = at + np.flatnonzero(~self._used[at:stop] & (self._over[at:stop] == 0))[:left]
            found.append(some)
            at, left = stop, left - len(some)
        beyond = max(at, self.extent)
        if left > 0 and self._holes:
            before = self.ids_in(beyond)
            ends = [self.places_for(before + each) - 1 for each in range(1, left + 1)]
            return np.concatenate([*found, np.array(ends, dtype=np.int64)])
        return np.concatenate([*found, np.arange(beyond, beyond + left)])

    def _occupy(self, places: IdArray) -> None:
        if not len(places):
            return
        assert int(places[-1]) < len(self._used), "a place beyond the arena"
        self._used[places] = True
        self.num_used += len(places)
        self._first_free = int(places[-1]) + 1
        self.extent = max(self.extent, self._first_free)

    def _vacate(self, places: IdArray) -> None:
        if not len(places):
            return
        self._used[places] = False
        self.num_used -= len(places)
        self._first_free = min(self._first_free, int(places.min()))
        if int(places.max()) + 1 == self.extent:
            self._shrink()

    def _shrink(self) -> None:
        """The last place before the extent may be free."""
        end = self.extent
        while end:
            start = max(0, end - _SCANNED)
            used = np.flatnonzero(self._used[start:end] & (self._over[start:end] == 0))
            self.extent = start + int(used[-1]) + 1 if len(used) else start
            end = 0 if len(used) else start


class Arena:
    """The pools of two groups, in the order of the layout. A group *reaches* as far as its places in use."""

    def __init__(self, layout: ArenaLayout, names: Sequence[str]) -> None:
        self.layout = layout
        self.pools = tuple(EndPool(self, group, name=name) for group, name in enumerate(names))

    def reach_of(self, group: int) -> int:
        """Places that a group may use as the other lies."""
        other = self.pools[1 - group]
        return self.layout.most(group, max(other.extent, other.places_for(other.num_live)))

    def lack(self, counts: Sequence[int]) -> int:
        """Bytes that so many places of each group need beyond what there is; at most 0: they fit."""
        (one, other), (count, beside) = self.layout.strides, counts
        return one * count + other * beside - self.layout.room

    def extents_with(self, wanted: Sequence[int]) -> list[int]:
        """The extent of each pool once it has so many ids more and nothing has moved."""
        return [
            max(each.extent, each.places_for(each.num_live + n)) for each, n in zip(self.pools, wanted, strict=True)
        ]

    def change_hole(self, group: int, at: int, change: int) -> None:
        """An allocated id of a group is a hole from now on, or no more."""
        self.pools[group].num_apart += change
        self.pools[group].set_over(np.array([at]), change)
        under = self.layout.under(group, at)
        self.pools[1 - group].set_over(np.arange(under.start, under.stop), change)

    def make_way(self, wanted: Sequence[int]) -> Move | None:
        """What has to move for so many ids of each group to be allocated. Changes nothing; `moved` follows the copies.
        They fit beside what must not move, so at most one of them has free places that it does not want."""
        moves = (self.retreat(group, wanted) for group in (0, 1))
        return next((move for move in moves if len(move.sources)), None)

    def retreat(
        self, group: int, wanted: Sequence[int], fixed: IdArray | Sequence[int] = (), most: int = sys.maxsize
    ) -> Move:
        """What of a group has to move, no further than necessary and than it can, for so many ids of each group to be
        allocated: at most `most` of its frames, and none that is `fixed`."""
        pool, extents = self.pools[group], self.extents_with(wanted)
        needed = pool.places_for(pool.num_live + wanted[group])
        by = max(0, -(-self.lack(extents) // self.layout.strides[group]))
        return Move(group, *pool.retreat(max(needed, extents[group] - by), fixed, most))
