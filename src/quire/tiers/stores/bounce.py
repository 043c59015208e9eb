"""Bounce: memory that a transfer engine has registered, through which records pass."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import LifoQueue


class Lane:
    """A piece of registered memory for one batch at a time."""

    def __init__(self, memory: memoryview, address: int) -> None:
        self.memory = memory
        self.address = address

    def places(self, sizes: Sequence[int]) -> list[int]:
        """Offsets, one behind the other, of records of these sizes. They fit: `Bounce.batches` saw to it."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _ALIGNED) * _ALIGNED
        return offsets


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
        batch: list[int] = []
        total = 0
        for index, size in enumerate(sizes):
            room = -(-size // _ALIGNED) * _ALIGNED
            if room > self.lane_bytes:
                continue
            if batch and (total + room > min(self.lane_bytes, most_bytes) or len(batch) == most):
                yield batch
                batch, total = [], 0
            batch.append(index)
            total += room
        if batch:
            yield batch


_ALIGNED = 64
