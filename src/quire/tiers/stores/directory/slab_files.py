"""SlabFiles: the files of records, read and written by several threads, with direct I/O if the filesystem supports it.

Whole blocks of the first pieces of a record are transferred directly while these are aligned in memory, and through the
page cache all pieces of at least a block. Other bytes, and a last partial block, pass through an aligned buffer.
Records that are adjacent in a file are transferred in one call.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from operator import itemgetter
from pathlib import Path
from threading import Lock, local
from typing import NamedTuple

import numpy as np

from quire.owned_files import check_file, check_folder, make_file, open_owned

Place = tuple[int, int, Sequence[memoryview]]  # a slab, an offset in it, and the bytes to read or write, in pieces

BLOCK = 4096  # O_DIRECT requires that offsets, lengths and addresses are multiples of this
_DIRECT = getattr(os, "O_DIRECT", 0)
_PIECE = 4 << 20  # bytes of one call at most; larger records are cut, so that several threads move them
_PARTS = 500  # pieces of memory in one call: the system takes 1,024, with what is between them

_PASSES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE}


def _check_gone(error: OSError) -> None:
    """Raises an error that passes: the file, and what is in it, may be whole."""
    if error.errno in _PASSES:
        raise error


class _SlabFile:
    """An open slab. Its descriptor is closed with the last reference, so that it stays open for transfers in flight."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)

    @property
    def is_removed(self) -> bool:
        try:
            return os.fstat(self.descriptor).st_nlink == 0
        except OSError:  # a filesystem of a network: the file is opened again
            return True


class _Buffer(local):
    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, _PIECE))  # on a block boundary


class SlabFiles:
    """Slab files by number, which is never reused, for any thread. `direct` says whether I/O bypasses the page cache.
    Each thread has a buffer of 4 MiB, of which it touches what it needs; the calling thread works too."""

    def __init__(self, folder: Path, *, direct: bool | None, threads: int = 1) -> None:
        """`direct` None: if the filesystem supports it. Raises OSError if no file can be created, or not so."""
        self._folder = folder
        self._lock = Lock()
        self._files: dict[int, _SlabFile] = {}
        folder.mkdir(mode=0o700, exist_ok=True)
        check_folder(folder)
        possible = _can_be_direct(folder)
        if direct and not possible:
            raise OSError(errno.EINVAL, "this filesystem cannot read and write around the page cache")
        self.direct = possible if direct is None else direct
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="quire-directory")
        self._buffer = _Buffer()

    def path(self, slab: int) -> Path:
        """The path of a slab."""
        return self._folder / f"{slab:012x}.slab"

    def numbers(self) -> set[int]:
        """The slabs that have a file."""
        return {int(path.stem, 16) for path in self._folder.glob("*.slab")}

    def size(self, slab: int) -> int | None:
        """Bytes of the file; None if there is none of this user. Raises OSError if that cannot be told now."""
        try:
            check_file(self.path(slab))
            return self.path(slab).lstat().st_size
        except OSError as error:
            _check_gone(error)
            return None

    @property
    def free_bytes(self) -> int:
        """Bytes that the disk has for this user; 0 if that cannot be told."""
        with suppress(OSError):
            disk = os.statvfs(self._folder)
            return disk.f_bavail * disk.f_frsize
        return 0

    def read(self, places: Sequence[Place]) -> list[bool]:
        """Fill memory from files. False: there is no file, it is shorter, or it cannot be read. Raises OSError for what
        passes, such as too many open files."""
        return self._move(places, writes=False)

    def write(self, places: Sequence[Place]) -> list[bool]:
        """Write memory to files, in whole blocks. False: there is no file, or not all of it was written. As `read`."""
        return self._move(places, writes=True)

    def drop(self, slab: int) -> None:
        """Remove a file that has no records. Its bytes are free at once, even while other processes have it open."""
        with suppress(OSError):
            file = open_owned(self.path(slab), os.O_RDWR)
            os.ftruncate(file, 0)
            os.close(file)
        with suppress(OSError):
            self.path(slab).unlink(missing_ok=True)
        with self._lock:
            self._files.pop(slab, None)

    def close_removed(self) -> None:
        """Close files that another process has removed; until then the disk retains their blocks."""
        with self._lock:
            for slab in [slab for slab, file in self._files.items() if file.is_removed]:
                del self._files[slab]

    def sync(self, slabs: set[int]) -> None:
        """Flush writes to these slabs to the disk. Raises OSError."""
        for slab in slabs:
            file = self._open(slab)
            if file is None:
                raise OSError(errno.ENOENT, f"slab {slab} is gone")
            os.fdatasync(file.descriptor)

    def close(self) -> None:
        """Close all files, after transfers in flight."""
        self._pool.shutdown()
        with self._lock:
            self._files.clear()

    def _open(self, slab: int) -> _SlabFile | None:
        """The file, open while the caller refers to it; None if it was removed."""
        with self._lock:
            file = self._files.pop(slab, None)
            try:
                if file is None or file.is_removed:
                    flags = os.O_RDWR | (_DIRECT if self.direct else 0)
                    file = _SlabFile(open_owned(self.path(slab), flags))
            except OSError as error:
                _check_gone(error)
                return None
            self._files[slab] = file
            return file

    def _move(self, places: Sequence[Place], *, writes: bool) -> list[bool]:
        files = {slab: self._open(slab) for slab in {slab for slab, _, _ in places}}  # open until all are transferred
        failed = {record for record, (slab, _, _) in enumerate(places) if files[slab] is None}
        runs = deque(_runs(places, {slab: file.descriptor for slab, file in files.items() if file is not None}))

        def drain() -> None:
            while runs:
                try:
                    run = runs.popleft()
                except IndexError:
                    break
                try:
                    _move_run(run, self._buffer.memory, failed, writes=writes, direct=self.direct)
                except BaseException:
                    failed.update(piece.record for piece in run)
                    raise

        others: list[Future[None]] = []
        with suppress(RuntimeError):  # the interpreter ends and starts no threads
            others += [self._pool.submit(drain) for _ in range(min(self._threads, len(runs)) - 1)]
        try:
            drain()
        finally:  # no thread uses the memory any more
            others = [other for other in others if not other.cancel()]
            wait(others)
        for other in others:
            other.result()
        return [record not in failed for record in range(len(places))]


class _Piece(NamedTuple):
    descriptor: int
    offset: int
    parts: Sequence[memoryview]
    num_bytes: int
    length: int  # in whole blocks
    record: int


def _cut(parts: Sequence[memoryview]) -> Iterator[tuple[int, Sequence[memoryview], int]]:
    """Parts of a record, each with its offset and its bytes, which are at most `_PIECE`."""
    total, most = sum(map(len, parts)), _PIECE if len(parts) <= _PARTS else _PIECE // 4
    if total <= most:
        yield 0, parts, total
        return
    for start in range(0, total, most):
        stop, at, some = min(start + most, total), 0, []
        for part in parts:
            some.append(part[max(0, start - at) : max(0, stop - at)])
            at += len(part)
        yield start, [part for part in some if len(part)], stop - start


def _runs(places: Sequence[Place], descriptors: dict[int, int]) -> list[list[_Piece]]:
    """Cut places into pieces, and group adjacent pieces that fit one call."""
    pieces = [
        _Piece(descriptors[slab], offset + at, some, num_bytes, -(-num_bytes // BLOCK) * BLOCK, record)
        for record, (slab, offset, parts) in enumerate(places)
        if slab in descriptors
        for at, some, num_bytes in _cut(parts)
    ]
    runs: list[list[_Piece]] = []
    end, room, parts = (-1, -1), 0, 0
    for piece in sorted(pieces, key=itemgetter(0, 1)):
        descriptor, offset, some, _, length, _ = piece
        if (descriptor, offset) == end and length <= room and len(some) <= parts:
            runs[-1].append(piece)
        else:
            runs.append([piece])
            room, parts = _PIECE, _PARTS
        room, parts = room - length, parts - len(some)
        end = (descriptor, offset + length)
    return runs


def is_aligned(memory: memoryview) -> bool:
    """Whether it begins on a block boundary."""
    return bool(np.frombuffer(memory, np.uint8).__array_interface__["data"][0] % BLOCK == 0)


def _move_run(run: list[_Piece], bounce: memoryview, failed: set[int], *, writes: bool, direct: bool) -> None:
    """Read or write pieces in one call. A partial transfer is repeated piece by piece."""
    vector: list[memoryview] = []
    through: list[tuple[memoryview, memoryview]] = []  # memory, and its part of the bounce buffer
    used = 0
    for piece in run:
        start = used
        for part in piece.parts:
            size = straight = len(part)
            if size < BLOCK:
                straight = 0
            elif direct:  # and after a part that is not straight none is, because its blocks have no boundary
                straight = size // BLOCK * BLOCK if used == start and is_aligned(part) else 0
            if straight:
                if used > start:
                    vector.append(bounce[start:used])
                    start = used
                vector.append(part if straight == size else part[:straight])
            if straight < size:
                end = used + size - straight
                through.append((part[straight:], bounce[used:end]))
                used = end
        end = used + piece.length - piece.num_bytes
        if writes and end > used:
            bounce[used:end] = bytes(end - used)  # not bytes of another record
        if end > start:
            vector.append(bounce[start:end])
        used = end
    if writes:
        for memory, buffer in through:
            buffer[:] = memory
    first, last = run[0], run[-1]
    try:
        moved = (os.pwritev if writes else os.preadv)(first.descriptor, vector, first.offset)
    except OSError as error:
        _check_gone(error)
        moved = 0
    if not writes:
        for memory, buffer in through:
            memory[:] = buffer
    if moved < last.offset - first.offset + last.num_bytes:
        if len(run) == 1:
            failed.add(first.record)
        for piece in run if len(run) > 1 else ():
            _move_run([piece], bounce, failed, writes=writes, direct=direct)


def _can_be_direct(folder: Path) -> bool:
    """Whether O_DIRECT works; on a full disk an existing slab is read. Raises OSError if no file can be created."""
    probe = folder / f"probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        make_file(probe, BLOCK)
        return _moves_direct(probe, writes=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return any(_moves_direct(slab, writes=False) for slab in islice(folder.glob("*.slab"), 1))
    finally:
        probe.unlink(missing_ok=True)


def _moves_direct(path: Path, *, writes: bool) -> bool:
    with mmap.mmap(-1, BLOCK) as block, suppress(OSError):
        file = open_owned(path, os.O_RDWR | _DIRECT)
        try:
            is_written = not writes or os.pwrite(file, block, 0) == BLOCK
            return bool(_DIRECT) and is_written and os.preadv(file, [block], 0) == BLOCK
        finally:
            os.close(file)
    return False
