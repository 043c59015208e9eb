"""HostPool: the records of all groups in host memory; and allocators of token slots of host frames."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.errors import HostMemoryError, InvalidInput, OutOfPages
from quire.memory.allocator import BaseTokenToKVPoolAllocator, PagedTokenToKVPoolAllocator
from quire.memory.mapping import Progress, reserve, touch
from quire.memory.record import RecordFormat, Rows
from quire.spec.group import GroupSpec
from quire.spec.ids import Ids
from quire.spec.pages import pages_for
from quire.spec.record_size import record_stride, records_bytes, region_bytes


class HiSparseHostPoolMixin(BaseTokenToKVPoolAllocator):
    """Host slots for the tokens of requests, in whole pages.

    `req_to_host_pool` is `[rows, width]`, int32, with the slot of each token and -1 where there is none.
    `req_to_host_pool_allocated_len` is int64 `[rows]`: tokens of each row that have slots, in whole pages.
    The caller owns both; they are written only when an allocation succeeds.
    """

    def alloc_page(self, num_pages: int) -> Ids:
        """Token slots of `num_pages` pages, int32. Raises OutOfPages, changing nothing."""
        return self.alloc(num_pages * self.page_size)

    def alloc_paged_token_slots(
        self,
        req_to_host_pool: Ids,
        req_to_host_pool_allocated_len: npt.NDArray[np.int64],
        req_pool_idx: int,
        start_pos: int,
        num_tokens: int,
    ) -> Ids:
        """The slots of tokens `start_pos..start_pos + num_tokens` of a row, int32, a copy; missing pages are allocated.

        Changing nothing, raises OutOfPages, which names the row that holds most, and InvalidInput where the row does
        not exist, is too narrow, or would get a gap.
        """
        if num_tokens <= 0:
            return np.empty(0, dtype=np.int32)
        lengths = req_to_host_pool_allocated_len
        row = _row(req_to_host_pool, req_pool_idx, len(lengths))
        allocated = int(lengths[req_pool_idx])
        end = start_pos + num_tokens
        page_end = pages_for(end, self.page_size) * self.page_size
        if not 0 <= start_pos <= allocated:
            raise InvalidInput(
                f"row {req_pool_idx} has slots for {allocated} tokens, and token {start_pos} does not continue them.",
                fix=f"start at 0 to {allocated}.",
            )
        if allocated % self.page_size:
            raise InvalidInput(
                f"row {req_pool_idx} has slots for {allocated} tokens, no number of pages of {self.page_size}."
            )
        if page_end > len(row):
            raise InvalidInput(
                f"{end} tokens take {page_end} slots in pages of {self.page_size}; a row has room for {len(row)}.",
                fix="make rows as wide as the longest request, rounded up to whole pages.",
            )
        if page_end > allocated:
            new_pages = (page_end - allocated) // self.page_size
            if new_pages > self.num_free_pages:
                pages = lengths // self.page_size
                most = int(pages.argmax())
                held = f"rows hold {int(pages.sum())}, row {most} of them {int(pages[most])}"
                raise OutOfPages(group=self.name, wanted=new_pages, free=self.num_free_pages, held_by=held)
            row[allocated:page_end] = self.alloc_page(new_pages)
            lengths[req_pool_idx] = page_end
        slots: Ids = row[start_pos:end].astype(np.int32)
        return slots

    def allocated_host_indices(self, req_to_host_pool: Ids, req_pool_idx: int, allocated_len: int) -> Ids:
        """Slots of a row's first `allocated_len` tokens, rounded up to pages, for `free`; int32, a copy without -1.

        Raises InvalidInput where the row does not exist.
        """
        row = _row(req_to_host_pool, req_pool_idx, len(req_to_host_pool))
        if allocated_len < 0:
            raise InvalidInput(f"a row cannot have slots for {allocated_len} tokens.")
        found = row[: pages_for(int(allocated_len), self.page_size) * self.page_size]
        slots: Ids = found[found >= 0].astype(np.int32)
        return slots


class HostTokenToKVPoolAllocator(HiSparseHostPoolMixin, PagedTokenToKVPoolAllocator):
    """Token slots of host frames, in pages of one or more tokens, as large as the device's."""


def _row(req_to_host_pool: Ids, req_pool_idx: int, num_lengths: int) -> Ids:
    num_rows = min(len(req_to_host_pool), num_lengths)
    if not 0 <= req_pool_idx < num_rows:
        raise InvalidInput(f"row {req_pool_idx} does not exist; there are {num_rows} rows.")
    row: Ids = req_to_host_pool[req_pool_idx]
    return row


class HostPool:
    """Host memory for the records of all groups: `frames[i]` frames, and row 0, of the group at index i.

    It is one anonymous mapping of `num_bytes`. The constructor touches all of it, so that it fails at once where memory
    is short; see `touch` for `threads` and `progress`. `pinned` registers the memory with CUDA, if there is one.

    The pool owns the memory until `close`; views stay readable after that and read zeros. Raises HostMemoryError, and
    then keeps nothing.
    """

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
        self.pinned = False
        self._formats = [RecordFormat.of(part, group.layout) for part, group in enumerate(groups)]
        self._memory = reserve(self.num_bytes)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._rows: list[Rows] = []
        start = 0
        for group, count in zip(groups, frames, strict=True):
            stride = record_stride(group.layout.bytes_per_frame)
            self._rows.append(self._bytes[start : start + (count + 1) * stride].reshape(count + 1, stride))
            start += region_bytes(group.layout.bytes_per_frame, count)
        assert start == self.num_bytes
        try:
            touch(self._bytes, threads, progress)
            self.pinned = pinned and _register(self._bytes)
        except BaseException:
            self.close()
            raise

    def rows(self, group: int) -> Rows:
        """The records of a group, uint8 `[frames + 1, stride]`, live, aligned to 4 KiB; row 0 is padding."""
        return self._rows[group]

    def format(self, group: int) -> RecordFormat:
        """The format of a group's records."""
        return self._formats[group]

    def close(self) -> None:
        """Give the memory back to the system, also while views exist. A second call does nothing."""
        if not len(self._bytes):
            return
        if self.pinned:
            _unregister(self._bytes)
            self.pinned = False
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._rows = []
        self._bytes = np.empty(0, dtype=np.uint8)
        try:
            self._memory.close()
        except BufferError:
            return  # there are views: the bytes are gone already, and the addresses go with the last view


def _register(memory: npt.NDArray[np.uint8]) -> bool:
    """Pin `memory` for CUDA; False where there is no CUDA. Not run on a GPU yet."""
    import torch

    if not torch.cuda.is_available():
        return False
    status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise HostMemoryError(
            f"{memory.nbytes:,} bytes of host memory could not be pinned: CUDA error {int(status)}.",
            fix="lower --host-memory, or raise the limit of locked memory (ulimit -l).",
        )
    return True


def _unregister(memory: npt.NDArray[np.uint8]) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]
