"""IdPool: which ids of a pool are free, in the order of their next use, and which are allocated."""

from __future__ import annotations

from typing import Literal

import numpy as np

from quire.errors import InvalidFree, InvalidInput, OutOfPages
from quire.memory.runs import IdArray, as_index, counting, in_order, is_ascending
from quire.spec.ids import Bools, Ids

Reuse = Literal["first", "last", "sorted"]
"""Freed ids are added at the front or the back, or wait to be sorted in when an allocation would fail without them."""


class IdPool:
    """Ids 1 to `size`, at first all free, in ascending order. `group` and `noun` are for messages.

        free --set_aside--> aside --mark_out--> out --take_back--> aside --put--> free
        free <--resize--> withdrawn <--put-- aside, of an id beyond the limit

    Ids beyond the `limit` are not handed out. Those that are out stay so until they are freed, or `moved`. Free ids are
    in a ring; every operation costs O(ids moved), but `resize`, `inwards` and `moved`, which cost O(size).
    """

    def __init__(self, size: int, reuse: Reuse, *, group: str, noun: str = "page") -> None:
        self.size = size
        self._reuse = reuse
        self._group = group
        self._noun = noun
        self._up = counting(size + 1)
        self.limit = size
        self.clear()

    def clear(self) -> None:
        """Free all ids, in ascending order. The limit stays."""
        self._ring = self._up[1:].copy()
        self._head = 0
        self._num_free = self._num_ordered = self.limit
        self._unordered: list[Ids] = []  # free, and not in the ring yet
        self._withdrawn = self._up[self.limit + 1 :].copy()
        self._out = np.zeros(self.size + 1, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        """Ids that can be allocated."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Ids that are allocated or set aside."""
        return self.size - self._num_free - len(self._withdrawn)

    @property
    def num_withdrawn(self) -> int:
        """Ids beyond the limit that are not in use."""
        return len(self._withdrawn)

    @property
    def num_beyond(self) -> int:
        """Ids beyond the limit that are in use."""
        return self.size - self.limit - len(self._withdrawn)

    @property
    def last_present(self) -> int:
        """The last id that can be handed out or is allocated. O(1) if none beyond the limit is in use, else O(size)."""
        return int(np.flatnonzero(self._out).max(initial=self.limit)) if self.num_beyond else self.limit

    def is_out(self, ids: Ids | slice) -> Bools:
        """Per id: whether it is allocated; a copy."""
        return np.array(self._out[ids])

    # -- handing out

    def check_room(self, count: int, free: int | None = None) -> None:
        """Raises OutOfPages if `count` is more than `free`, by default all free ids."""
        if count < 0:
            raise InvalidInput(f"cannot allocate {count} {self._noun}s.")
        if count > (available := self.num_free if free is None else free):
            raise OutOfPages(group=self._group, wanted=count, free=available)

    def take(self, count: int) -> Ids:
        """Allocate the next `count` ids, a fresh array. Raises OutOfPages, changing nothing."""
        ids = self.set_aside(count)
        self.mark_out(ids)
        return ids

    def set_aside(self, count: int) -> Ids:
        """Remove the next `count` ids from the free ones, a fresh array. Raises OutOfPages, changing nothing."""
        if not 0 <= count <= self._num_ordered:
            self.check_room(count)
            self._order()
        ids = self._first(count)
        self._head = (self._head + count) % self.size
        self._num_ordered -= count
        self._num_free -= count
        return ids

    def mark_out(self, ids: Ids) -> None:
        """Allocate ids that are set aside."""
        self._out[as_index(ids, self._up)] = True

    # -- giving back

    def check_out(self, ids: IdArray) -> IdArray | slice:
        """These ids as an index. Raises InvalidFree if one is not allocated or is given twice."""
        at = as_index(ids, self._up)
        if isinstance(at, slice):
            if self._out[at].tobytes().count(1) != len(ids):
                raise self._wrong(ids)
            return at
        ordered = in_order(ids)
        if len(ids) and (ordered.item(0) < 1 or ordered.item(-1) > self.size):
            raise self._wrong(ids)
        if np.count_nonzero(self._out[ordered]) != len(ids) or not (ordered is ids or is_ascending(ordered)):
            raise self._wrong(ids)
        return ids

    def take_back(self, ids: IdArray) -> None:
        """Set allocated ids aside. Raises InvalidFree, changing nothing, if one is not allocated or is given twice."""
        self._out[self.check_out(ids)] = False

    def put(self, ids: Ids) -> None:
        """Free ids that are set aside."""
        if self.limit < self.size and np.count_nonzero(beyond := ids > self.limit):
            self._withdrawn = np.concatenate((self._withdrawn, ids[beyond]))
            ids = ids[~beyond]
        count, ring = len(ids), self._ring
        self._num_free += count
        if self._reuse == "sorted":
            self._unordered.append(ids.copy())
            return
        if self._reuse == "first":
            at = self._head = (self._head - count) % self.size
        else:
            at = (self._head + self._num_ordered) % self.size
        self._num_ordered += count
        fitting = self.size - at
        if count <= fitting:
            ring[at : at + count] = ids
        else:
            ring[at:], ring[: count - fitting] = ids[:fitting], ids[fitting:]

    # -- another size

    def resize(self, limit: int) -> None:
        """Hand out ids up to `limit` from now on, those that are free in ascending order."""
        assert 0 <= limit <= self.size, "a limit outside the pool"
        self._order()
        ids = np.concatenate((self._ring[: self._num_free], self._withdrawn))
        ids.sort()
        self.limit = limit
        self._withdrawn = ids[ids > limit]
        self._set_free(ids[: len(ids) - len(self._withdrawn)])

    def inwards(self, fixed: IdArray, most: int) -> tuple[Ids, Ids]:
        """At most `most` allocated ids beyond the limit, the outermost, but those in `fixed`; and those further in to
        which they can move: free ones, then withdrawn ones. Both ascend. They have not changed until `moved`."""
        sources = self.limit + 1 + np.flatnonzero(self._out[self.limit + 1 :]).astype(np.int32)
        sources = sources[~np.isin(sources, fixed)][-most:]
        targets = self._next_free(len(sources))
        if len(targets) < len(sources):
            targets = np.concatenate((targets, np.sort(self._withdrawn)[: len(sources) - len(targets)]))
        count = int(np.count_nonzero(targets < sources[::-1][: len(targets)]))
        return sources[len(sources) - count :], targets[:count]

    def moved(self, sources: Ids, targets: Ids) -> None:
        """Ids `targets`, which were free or withdrawn, are allocated instead of `sources`, beyond the limit."""
        self._out[sources], self._out[targets] = False, True
        self._withdrawn = np.concatenate((self._withdrawn[~self._out[self._withdrawn]], sources))
        self._set_free((free := self._ring[: self._num_free])[~self._out[free]])  # in order since `inwards`

    def set_apart(self, at: int) -> None:
        """An allocated id has wrong bytes. In this class no other id has these."""

    def use_again(self, at: int) -> None:
        """An id that was set apart is allocated as any other, until its owner frees it."""

    def _next_free(self, most: int) -> Ids:
        """The lowest free ids, ascending, at most so many."""
        self._order()
        return self._ring[: min(most, self._num_free)].copy()

    def _set_free(self, ids: Ids) -> None:
        """These ids are free, and no others; all are in the ring, in this order."""
        self._ring[: len(ids)] = ids
        self._head, self._num_free, self._num_ordered, self._unordered = 0, len(ids), len(ids), []

    def _first(self, count: int) -> Ids:
        ids = self._ring[self._head : self._head + count]
        return ids.copy() if len(ids) == count else np.concatenate((ids, self._ring[: count - len(ids)]))

    def _order(self) -> None:
        everything = np.concatenate((self._first(self._num_ordered), *self._unordered))
        everything.sort()
        self._set_free(everything)

    def _wrong(self, ids: IdArray) -> InvalidFree:
        ordered = np.sort(ids)
        low, high = int(ordered[0]), int(ordered[-1])
        if low < 1 or high > self.size:
            why = f"{low if low < 1 else high} given back, but this pool hands out {self._noun}s 1 to {self.size}."
        elif len(stray := ids[~self._out[ids]]):
            why = f"{int(stray[0])} given back, but it is not out (freed twice?)."
        else:
            why = f"{int(ordered[1:][ordered[1:] == ordered[:-1]][0])} given back twice in one call."
        return InvalidFree(f"group '{self._group}': {self._noun} {why}")
