"""Transfer: records between memory and slab files, in aligned pieces and on several threads.

A record that begins on a block boundary of memory moves from and to there; what does not, and the last block of
every record, goes through an aligned buffer. Records that lie side by side move in one call.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from quire.tiers.stores.directory.slab_files import BLOCK, SlabFile

Bytes = npt.NDArray[np.uint8]

Place = tuple[SlabFile, int, Bytes]
"""A file, where in it, and the memory to move."""

PIECE = 1 << 20
"""The most bytes of one call. Larger records are cut, so that several threads are at them."""


@dataclass(slots=True)
class Piece:
    """A run of bytes in memory and its place in a file. `done` once it has moved in full."""

    file: SlabFile
    offset: int
    memory: Bytes
    done: bool = field(default=False)

    @property
    def length(self) -> int:
        """Bytes that it takes in the file, in whole blocks."""
        return -(-len(self.memory) // BLOCK) * BLOCK


def as_bytes(buffer: Buffer) -> Bytes:
    """A buffer as a flat array of its bytes, without a copy."""
    view = memoryview(buffer)
    if not view.nbytes:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(view, dtype=np.uint8)


class Transfer:
    """Threads and the buffers they use. The calling thread works too, and returns when everything has moved or failed.

    Buffers: one of 1 MiB for each thread at work.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="quire-directory")
        self._bounces: deque[_Bounce] = deque()

    def read(self, places: Sequence[Place]) -> list[bool]:
        """Fill memory from (file, offset) each. False: the file was shorter than that, or could not be read."""
        return self._move(places, _read)

    def write(self, places: Sequence[Place]) -> list[bool]:
        """Write memory to (file, offset) each, in whole blocks. False: not, or not all of it."""
        return self._move(places, _write)

    def close(self) -> None:
        """Wait for what is under way."""
        self._pool.shutdown()
        self._bounces.clear()

    def _move(self, places: Sequence[Place], move: Callable[..., None]) -> list[bool]:
        cut = [list(_cut(*place)) for place in places]
        runs = deque(_runs([piece for pieces in cut for piece in pieces]))

        def drain() -> None:
            try:
                bounce = self._bounces.pop()
            except IndexError:
                bounce = _Bounce()
            while runs:
                try:
                    run = runs.popleft()
                except IndexError:
                    break
                move(run, bounce)
            if len(self._bounces) < 2 * self._threads:
                self._bounces.append(bounce)

        others = self._ask(drain, min(self._threads, len(runs)) - 1)
        drain()
        wait([other for other in others if not other.cancel()])
        return [all(piece.done for piece in pieces) for pieces in cut]

    def _ask(self, work: Callable[[], None], threads: int) -> list[Future[None]]:
        """So many threads begin to work; none where the interpreter ends and starts no more, and the caller does it."""
        try:
            return [self._pool.submit(work) for _ in range(threads)]
        except RuntimeError:
            return []


class _Bounce:
    """An aligned buffer."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, PIECE)  # goes with the last array on it
        self.memory: Bytes = np.frombuffer(self._map, dtype=np.uint8)


def _cut(file: SlabFile, offset: int, memory: Bytes) -> list[Piece]:
    if len(memory) <= PIECE:
        return [Piece(file, offset, memory)]
    return [Piece(file, offset + at, memory[at : at + PIECE]) for at in range(0, len(memory), PIECE)]


def _runs(pieces: list[Piece]) -> list[list[Piece]]:
    """Pieces that lie side by side, together as long as they fit one call."""
    runs: list[list[Piece]] = []
    end, room = (-1, -1), 0
    for piece in sorted(pieces, key=lambda piece: (piece.file.descriptor, piece.offset)):
        length = piece.length
        if (piece.file.descriptor, piece.offset) == end and length <= room:
            runs[-1].append(piece)
        else:
            runs.append([piece])
            room = PIECE
        room -= length
        end = (piece.file.descriptor, piece.offset + length)
    return runs


def _vector(run: list[Piece], bounce: _Bounce) -> tuple[list[Any], list[tuple[Piece, Bytes, Bytes]]]:
    """The buffers of one call, and of which piece which bytes of memory go through which part of the bounce buffer."""
    vector: list[Any] = []
    through: list[tuple[Piece, Bytes, Bytes]] = []
    at = 0
    for piece in run:
        memory = piece.memory
        straight = 0
        if memory.__array_interface__["data"][0] % BLOCK == 0:
            straight = len(memory) // BLOCK * BLOCK
            if straight:
                vector.append(memory[:straight])
        rest = piece.length - straight
        if rest:
            buffer = bounce.memory[at : at + rest]
            through.append((piece, memory[straight:], buffer))
            vector.append(buffer)
            at += rest
    return vector, through


def _write(run: list[Piece], bounce: _Bounce) -> None:
    vector, through = _vector(run, bounce)
    for _, memory, buffer in through:
        buffer[: len(memory)] = memory
        buffer[len(memory) :] = 0  # not what another record left there
    try:
        moved = os.pwritev(run[0].file.descriptor, vector, run[0].offset)
    except OSError:
        moved = 0
    _settle(run, bounce, moved, _write)


def _read(run: list[Piece], bounce: _Bounce) -> None:
    vector, through = _vector(run, bounce)
    try:
        moved = os.preadv(run[0].file.descriptor, vector, run[0].offset)
    except OSError:
        moved = 0
    for _, memory, buffer in through:
        memory[:] = buffer[: len(memory)]
    _settle(run, bounce, moved, _read)


def _settle(run: list[Piece], bounce: _Bounce, moved: int, again: Callable[[list[Piece], _Bounce], None]) -> None:
    """Which pieces have moved. A run that stopped in the middle goes on piece by piece."""
    start = run[0].offset
    for piece in run:
        piece.done = piece.offset - start + len(piece.memory) <= moved
    if len(run) > 1:
        for piece in run:
            if not piece.done:
                again([piece], bounce)
