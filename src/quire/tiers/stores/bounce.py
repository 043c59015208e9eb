"""Bounce: memory that a transfer engine has registered, through which records pass."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from queue import LifoQueue

from quire.tiers.stores.remote import batches

_ALIGNED = 64


class Lane:
    """A piece of registered memory for one batch at a time."""

    def __init__(self, memory: memoryview, address: int) -> None:
        self.memory = memory
        self.address = address

    def places(self, sizes: Sequence[int]) -> list[int]:
        """Offsets, one behind the other, of records of these sizes. They fit: `Bounce.batches` saw to it."""
        return list(accumulate(map(_room, sizes), initial=0))[:-1]


class Bounce:
    """Anonymous memory cut into lanes, each for one thread at a time. It is not freed while a lane is out."""

    def __init__(self, num_bytes: int, num_lanes: int) -> None:
        self.lane_bytes = num_bytes // num_lanes // mmap.PAGESIZE * mmap.PAGESIZE
        self.num_bytes = self.lane_bytes * num_lanes
        self._map = mmap.mmap(-1, self.num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        memory = memoryview(self._map)
        self._idle: LifoQueue[Lane] = LifoQueue()
        for start in range(0, self.num_bytes, self.lane_bytes):
            self._idle.put(Lane(memory[start : start + self.lane_bytes], self.address + start))

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane of one's own for the block; waits for one."""
        lane = self._idle.get()
        try:
            yield lane
        finally:
            self._idle.put(lane)

    def batches(self, sizes: Sequence[int], most: int, most_bytes: int) -> Iterator[list[int]]:
        """Indices of records that pass through one lane together: at most so many, and bytes unless it is one alone.

        Records that fit into no lane are in no batch.
        """
        fitting = [index for index, size in enumerate(sizes) if _room(size) <= self.lane_bytes]
        rooms = [_room(sizes[index]) for index in fitting]
        for batch in batches(rooms, most, min(self.lane_bytes, most_bytes)):
            yield [fitting[at] for at in batch]


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
