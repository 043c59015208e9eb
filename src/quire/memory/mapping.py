"""Large runs of memory: reserved in one piece, in huge pages where the system has some, and touched before use."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from quire.errors import HostMemoryError

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes that there will be. What it raises ends the touching."""

_CHUNK = 64 * 2**20
_SYSTEM_PAGE = 4096
_MOST_THREADS = 16


def reserve(num_bytes: int) -> mmap.mmap:
    """Addresses for that many bytes, with nothing behind them yet, in huge pages later where the system has some.

    Raises HostMemoryError.
    """
    try:
        # Private: shared memory would be a file of the system's, without huge pages, and charged as such.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise HostMemoryError(
            f"{num_bytes:,} bytes of host memory could not be reserved: {error}.", fix="lower --host-memory."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            # A kernel without them: slower to touch, and nothing else.
            return memory
    return memory


def touch(memory: npt.NDArray[np.uint8], threads: int | None = None, progress: Progress | None = None) -> None:
    """Write to every page of the system's in `memory`, which is zero and stays zero: from now on it is there.

    With as many threads as there are cores, up to 16, where `threads` is not given.
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
