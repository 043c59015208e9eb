"""FreeList: the ids that may be handed out next, in order. A ring; every operation costs what it moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidFree
from quire.memory.runs import IdArray, as_run, is_ascending
from quire.spec.ids import Bools, Ids

_MANY = 4096
_OUT = np.ones(_MANY, dtype=np.int32).tobytes()  # stamps of ids that are out


class FreeList:
    """A double-ended queue of at most `capacity` ids in one int32 array. It does not know what was handed out."""

    def __init__(self, ids: Ids, capacity: int) -> None:
        self._ring = np.zeros(capacity, dtype=np.int32)
        self._ring[: len(ids)] = ids
        self._head = 0
        self._count = len(ids)

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> Ids:
        """Remove and return the first `count` ids, a fresh array. The caller has checked that there are that many."""
        assert 0 <= count <= self._count
        taken = self._read(count)
        self._head = (self._head + count) % len(self._ring)
        self._count -= count
        return taken

    def push_front(self, ids: Ids) -> None:
        """Put `ids` first, in their order: they are handed out before everything that is here."""
        self._head = (self._head - len(ids)) % len(self._ring)
        self._count += len(ids)
        self._write(self._head, ids)

    def push_back(self, ids: Ids) -> None:
        """Put `ids` last, in their order."""
        at = (self._head + self._count) % len(self._ring)
        self._count += len(ids)
        self._write(at, ids)

    def to_array(self) -> Ids:
        """All ids in order, a copy."""
        return self._read(self._count)

    def _read(self, count: int) -> Ids:
        first = self._ring[self._head : self._head + count]
        if len(first) == count:
            return first.copy()
        return np.concatenate((first, self._ring[: count - len(first)]))

    def _write(self, at: int, ids: Ids) -> None:
        assert self._count <= len(self._ring)
        first = len(self._ring) - at
        if len(ids) <= first:
            self._ring[at : at + len(ids)] = ids
            return
        self._ring[at:] = ids[:first]
        self._ring[: len(ids) - first] = ids[first:]


class OutIds:
    """Which ids of a pool are handed out: one int32 for each, above zero while it is out. Id 0 never is.

    Ids that are given back in no order hold minus their places in that call afterwards, which is how a call that names
    an id twice is noticed without sorting: the id holds one place and was given at two.
    """

    def __init__(self, capacity: int) -> None:
        self._stamps = np.zeros(capacity + 1, dtype=np.int32)
        self._places = -np.arange(64, dtype=np.int32)

    def __len__(self) -> int:
        """Ids there are, 0 among them."""
        return len(self._stamps)

    def copy(self) -> OutIds:
        """An independent copy. O(ids)."""
        other = OutIds(0)
        other._stamps = self._stamps.copy()
        return other

    def hold(self, ids: Ids | slice) -> Bools:
        """Per id: whether it is out."""
        out: Bools = self._stamps[ids] > 0
        return out

    def mark(self, ids: Ids) -> None:
        """These are out now."""
        run = as_run(ids)
        self._stamps[ids if run is None else run] = 1

    def check(self, ids: IdArray, *, group: str, noun: str = "page") -> None:
        """Raises InvalidFree where `take_back` would."""
        ascending = is_ascending(ids)
        self._check_out(ids, as_run(ids, ascending), group, noun)
        if not ascending:
            self._place(ids, group, noun)
            self._stamps[ids] = 1

    def take_back(self, ids: IdArray, *, group: str, noun: str = "page") -> None:
        """These distinct ids are no longer out. Raises InvalidFree, changing nothing, if one is not, or is named twice.

        O(ids given back).
        """
        run = as_run(ids)
        self._check_out(ids, run, group, noun)
        if run is not None:
            self._stamps[run] = 0
        elif is_ascending(ids):
            self._stamps[ids] = 0
        else:
            self._place(ids, group, noun)

    def _check_out(self, ids: IdArray, run: slice | None, group: str, noun: str) -> None:
        if run is not None and len(ids) <= _MANY and self._stamps[run].tobytes() == _OUT[: 4 * len(ids)]:
            return
        try:
            stamps = self._stamps[_unsigned(ids) if run is None else run]
        except IndexError:
            raise self._wrong(ids, group, noun) from None
        if np.count_nonzero(stamps > 0) != len(ids):
            raise self._wrong(ids, group, noun)

    def _place(self, ids: IdArray, group: str, noun: str) -> None:
        count = len(ids)
        if count > len(self._places):
            self._places = -np.arange(2 * count, dtype=np.int32)
        places = self._places[:count]
        self._stamps[ids] = places
        if np.count_nonzero(self._stamps[ids] == places) != count:
            self._stamps[ids] = 1
            raise self._wrong(ids, group, noun)

    def _wrong(self, ids: IdArray, group: str, noun: str) -> InvalidFree:
        low, high = int(ids.min()), int(ids.max())
        if low < 1 or high >= len(self._stamps):
            return InvalidFree(
                f"group '{group}': {noun} {low if low < 1 else high} given back, but this pool hands out {noun}s 1 to "
                f"{len(self._stamps) - 1}."
            )
        stray = ids[self._stamps[ids] <= 0]
        if len(stray):
            return InvalidFree(f"group '{group}': {noun} {int(stray[0])} given back, but it is not out (freed twice?).")
        ordered = np.sort(ids)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        return InvalidFree(f"group '{group}': {noun} {int(twice[0])} given back twice in one call.")


def _unsigned(ids: IdArray) -> npt.NDArray[Any]:
    """The ids as an index that a negative one is out of, instead of counting from the end. Raises IndexError itself for
    wide ids, of which the index keeps the sign."""
    if ids.dtype == np.int32:
        return ids.view(np.uint32)
    if np.minimum.reduce(ids, initial=0) < 0:
        raise IndexError
    return ids
