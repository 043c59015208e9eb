"""FreeList: the ids that may be handed out next, in order. A ring; every operation costs what it moves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidFree
from quire.spec.ids import Bools, Ids


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
        first = min(len(ids), len(self._ring) - at)
        self._ring[at : at + first] = ids[:first]
        self._ring[: len(ids) - first] = ids[first:]


def check_given_back(ids: Ids | npt.NDArray[np.int64], out: Bools, *, group: str, noun: str = "page") -> None:
    """Raises InvalidFree unless these are distinct ids that are out. `out[id]` says whether an id is; 0 never is."""
    if not len(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 1 or high >= len(out):
        raise InvalidFree(
            f"group '{group}': {noun} {low if low < 1 else high} given back, but this pool hands out {noun}s 1 to "
            f"{len(out) - 1}."
        )
    if not out[ids].all():
        wrong = ids[~out[ids]]
        raise InvalidFree(f"group '{group}': {noun} {int(wrong[0])} given back, but it is not out (freed twice?).")
    if len(ids) > 1:
        ordered = np.sort(ids)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise InvalidFree(f"group '{group}': {noun} {int(twice[0])} given back twice in one call.")
