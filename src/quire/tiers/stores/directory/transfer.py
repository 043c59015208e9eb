"""Transfer: moves records between memory and slab files, in aligned pieces and on several threads.

Whole blocks of a record that is aligned in memory move directly. Other bytes, and a last partial block, pass through an
aligned buffer. Records that are adjacent in a file move in one call.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from operator import itemgetter
from threading import local
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from quire.tiers.stores.directory.slab_files import BLOCK, SlabFile

Bytes = npt.NDArray[np.uint8]
Place = tuple[SlabFile, int, Bytes]  # a file, an offset in it, and the memory to move
_PIECE = 1 << 20  # bytes of one call at most; larger records are cut, so that several threads move them


class _Piece(NamedTuple):
    descriptor: int
    offset: int
    memory: Bytes
    record: int

    @property
    def length(self) -> int:
        return -(-len(self.memory) // BLOCK) * BLOCK


def as_bytes(buffer: Buffer) -> Bytes:
    """A buffer as a flat array of its bytes, without a copy."""
    view = memoryview(buffer)
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


class _OfThread(local):
    def __init__(self) -> None:
        self.bounce = np.frombuffer(mmap.mmap(-1, _PIECE), dtype=np.uint8)  # on a block boundary


class Transfer:
    """Threads, each with a buffer of 1 MiB. The calling thread works too, and returns when all moved or failed."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="quire-directory")
        self._of_thread = _OfThread()

    def read(self, places: Sequence[Place]) -> list[bool]:
        """Fill memory from files. False: the file is shorter, or cannot be read."""
        return self._move(places, writes=False)

    def write(self, places: Sequence[Place]) -> list[bool]:
        """Write memory to files, in whole blocks. False: not all of it was written."""
        return self._move(places, writes=True)

    def close(self) -> None:
        """Wait for transfers under way."""
        self._pool.shutdown()

    def _move(self, places: Sequence[Place], *, writes: bool) -> list[bool]:
        runs = deque(_runs(places))
        failed: set[int] = set()

        def drain() -> None:
            bounce = self._of_thread.bounce
            while runs:
                try:
                    run = runs.popleft()
                except IndexError:
                    break
                _move_run(run, bounce, failed, writes=writes)

        others: list[Future[None]] = []
        with suppress(RuntimeError):  # the interpreter ends and starts no threads
            others += [self._pool.submit(drain) for _ in range(min(self._threads, len(runs)) - 1)]
        drain()
        wait([other for other in others if not other.cancel()])
        return [record not in failed for record in range(len(places))]


def _runs(places: Sequence[Place]) -> list[list[_Piece]]:
    """Cut places into pieces, and group adjacent pieces that fit one call."""
    pieces = [
        _Piece(file.descriptor, offset + at, memory[at : at + _PIECE] if len(memory) > _PIECE else memory, record)
        for record, (file, offset, memory) in enumerate(places)
        for at in range(0, max(1, len(memory)), _PIECE)
    ]
    runs: list[list[_Piece]] = []
    end, room = (-1, -1), 0
    for piece in sorted(pieces, key=itemgetter(0, 1)):
        length = piece.length
        if piece[:2] == end and length <= room:
            runs[-1].append(piece)
        else:
            runs.append([piece])
            room = _PIECE
        room -= length
        end = (piece.descriptor, piece.offset + length)
    return runs


def _move_run(run: list[_Piece], bounce: Bytes, failed: set[int], *, writes: bool) -> None:
    """Read or write pieces in one call. A partial one is repeated piece by piece."""
    vector: list[Any] = []
    through: list[tuple[Bytes, Bytes]] = []  # memory, and its part of the bounce buffer
    used = 0
    for piece in run:
        memory = piece.memory
        is_aligned = memory.__array_interface__["data"][0] % BLOCK == 0
        straight = len(memory) // BLOCK * BLOCK if is_aligned else 0
        if straight:
            vector.append(memory[:straight])
        rest = piece.length - straight
        if rest:
            buffer = bounce[used : used + rest]
            through.append((memory[straight:], buffer))
            vector.append(buffer)
            used += rest
    if writes:
        for memory, buffer in through:
            buffer[: len(memory)] = memory
            buffer[len(memory) :] = 0  # not bytes of another record
    first, last = run[0], run[-1]
    try:
        moved = (os.pwritev if writes else os.preadv)(first.descriptor, vector, first.offset)
    except OSError:
        moved = 0
    if not writes:
        for memory, buffer in through:
            memory[:] = buffer[: len(memory)]
    if moved < last.offset - first.offset + len(last.memory):
        if len(run) == 1:
            failed.add(first.record)
        for piece in run if len(run) > 1 else ():
            _move_run([piece], bounce, failed, writes=writes)
