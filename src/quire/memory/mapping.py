"""Large host memory: reserved in one piece, in huge pages where the system has some, and touched before use."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from quire.errors import HostMemoryError

Progress = Callable[[int, int], None]
"""Called with the bytes touched so far and all bytes. An exception that it raises ends the touching."""

_CHUNK = 64 * 2**20
_POPULATE = 16 * 2**20
_MADV_POPULATE_WRITE = 23
_SYSTEM_PAGE = 4096
_MOST_THREADS = 16


def reserve(num_bytes: int) -> mmap.mmap:
    """Address space of `num_bytes`, in huge pages where the system has some. Raises HostMemoryError."""
    try:
        # Private: shared memory is a file of the system, without huge pages, and charged as one.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise HostMemoryError(
            f"{num_bytes:,} bytes of host memory could not be reserved: {error}.", fix="lower --host-memory."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return memory  # a kernel without huge pages: only touching is slower
    return memory


def populate(memory: npt.NDArray[np.uint8]) -> Iterator[None]:
    """Make the system provide all of `memory`, piece by piece, whatever is in it: it may be in use. A system that has
    no such call (Linux before 5.14) provides it as it is written."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for start in range(0, len(memory), _POPULATE):
        piece = memory[start : start + _POPULATE]
        if madvise(ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(len(piece)), _MADV_POPULATE_WRITE):
            return
        yield


def touch(memory: npt.NDArray[np.uint8], threads: int | None = None, progress: Progress | None = None) -> None:
    """Make the system provide all of `memory`, which is zero and stays zero, by a write to each system page.

    `threads` are by default as many as cores, up to 16.
    """
    total = len(memory)

    def write(start: int) -> int:
        chunk = memory[start : start + _CHUNK]
        chunk[::_SYSTEM_PAGE] = 0
        return len(chunk)

    if total <= _CHUNK:
        write(0)
        if progress is not None:
            progress(total, total)
        return
    done = 0
    with ThreadPoolExecutor(threads or min(os.cpu_count() or 1, _MOST_THREADS), "quire-touch") as pool:
        try:
            for size in pool.map(write, range(0, total, _CHUNK)):
                done += size
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
