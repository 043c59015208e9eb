"""HostPool: the records of all groups in host memory, reserved in one piece and touched before use."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from quire.errors import HostMemoryError
from quire.memory.pinned import PinnedSlices
from quire.memory.record import HEADER_BYTES, RecordFormat, Records
from quire.spec.group import GroupSpec
from quire.spec.ids import Ids
from quire.spec.record_size import record_stride, records_bytes, region_bytes

Progress = Callable[[int, int], None]
"""Called with the number of touched bytes and of all bytes. An exception that it raises ends the touching."""

_CHUNK = 64 * 2**20
_POPULATE = 16 * 2**20
_MADV_POPULATE_WRITE = 23
_SYSTEM_PAGE = 4096
_MOST_THREADS = 16


def reserve(num_bytes: int) -> mmap.mmap:
    """Address space of `num_bytes`, in huge pages if the system has them. Raises HostMemoryError."""
    try:
        # Private: the system treats shared memory as a file, without huge pages, and charges it as one.
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
    """Make the system provide all of `memory`, piece by piece, without changing its content: it may be in use. A system
    without this call (Linux before 5.14) provides the memory when it is written."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for start in range(0, len(memory), _POPULATE):
        piece = memory[start : start + _POPULATE]
        if madvise(ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(len(piece)), _MADV_POPULATE_WRITE):
            return
        yield


def touch(memory: npt.NDArray[np.uint8], threads: int | None = None, progress: Progress | None = None) -> None:
    """Make the system provide all of `memory`, which is zero and stays zero, by a write to each system page. `threads`
    is by default the number of cores, up to 16."""
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


class HostPool:
    """Host memory for the records of all groups: `frames[i]` frames, and row 0, of the group at index i. It is one
    anonymous mapping of `num_bytes`. The constructor touches it (see `touch`), so that a shortage of memory fails at
    once. `pinned` then registers the rows with CUDA (`PinnedSlices`), if there is one, with `progress` too. The pool
    owns the memory until `close`; later, views read zeros. Raises HostMemoryError, and frees what it had reserved."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        frames: Sequence[int],
        *,
        pinned: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        assert all(count >= 0 for count in frames)
        self.frames = tuple(frames)
        self.num_bytes = records_bytes(groups, frames)
        self._pinned: PinnedSlices | None = None
        self.why_fixed = ""
        """Why its end cannot be given back, if so: its addresses are registered."""
        self._formats = [RecordFormat.of(part, group.layout) for part, group in enumerate(groups)]
        self._memory = reserve(self.num_bytes)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
        """All rows of all groups, uint8 `[num_bytes]`, live."""
        self._rows: list[Records] = []
        start = 0
        for group, count in zip(groups, frames, strict=True):
            stride = record_stride(group.layout.bytes_per_frame)
            self._rows.append(self.memory[start : start + (count + 1) * stride].reshape(count + 1, stride))
            start += region_bytes(group.layout.bytes_per_frame, count)
        assert start == self.num_bytes
        try:
            touch(self.memory, threads, progress)
            if pinned and _has_cuda():
                self._pinned = PinnedSlices(self._rows, progress)
                self.why_fixed = "it is registered with CUDA."
        except BaseException:
            self.close()
            raise

    @property
    def pinned(self) -> bool:
        """Whether the rows are registered with CUDA."""
        return self._pinned is not None

    def rows(self, group: int) -> Records:
        """The records of a group, uint8 `[frames + 1, stride]`, live, aligned to 4 KiB; row 0 is padding."""
        return self._rows[group]

    def payloads(self, group: int) -> Records:
        """The frames in a group's records, uint8 `[frames + 1, bytes_per_frame]`, live."""
        return self._rows[group][:, HEADER_BYTES : self._formats[group].num_bytes]

    def spans(self, group: int, frames: Ids) -> npt.NDArray[np.int64]:
        """Where the records of these frames lie in `memory`: (offset, length), int64 `[frames, 2]`."""
        rows = self._rows[group]
        first = rows.ctypes.data - self.memory.ctypes.data
        offsets = first + frames.astype(np.int64) * rows.shape[1]
        return np.stack((offsets, np.full(len(frames), self._formats[group].num_bytes, dtype=np.int64)), axis=1)

    def format(self, group: int) -> RecordFormat:
        """The format of a group's records."""
        return self._formats[group]

    def move(self, group: int, sources: Ids, targets: Ids) -> None:
        """Copy records of a group to other frames. No frame is among both."""
        rows = self._rows[group]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            rows[target] = rows[source]

    def keep(self, group: int, frames: int) -> None:
        """Have the first `frames` frames of a group, and give the memory of the others back to the system. Frames that
        come again are zero, and provided when they are written."""
        rows = self._rows[group]
        first, stride = rows.ctypes.data - self.memory.ctypes.data, rows.shape[1]
        start = -(-(first + (frames + 1) * stride) // _SYSTEM_PAGE) * _SYSTEM_PAGE
        stop = (first + rows.nbytes) // _SYSTEM_PAGE * _SYSTEM_PAGE
        if start < stop:
            self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Return the memory to the system, also while views exist. A second call does nothing."""
        if not len(self.memory):
            return
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._rows = []
        self.memory = np.empty(0, dtype=np.uint8)
        try:
            self._memory.close()
        except BufferError:
            return  # views exist: the bytes are freed already, and the addresses are freed with the last view


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
