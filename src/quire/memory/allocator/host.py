"""Allocators of token slots of host frames. Bookkeeping only, on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidInput, OutOfPages
from quire.memory.allocator.base import BaseTokenToKVPoolAllocator, Longs, PagedTokenToKVPoolAllocator, RowIds
from quire.spec.ids import Ids
from quire.spec.pages import pages_for

NO_PAGES: Ids = np.empty(0, dtype=np.int32)


class HiSparseHostPoolMixin(BaseTokenToKVPoolAllocator):
    """Host slots for the tokens of requests, in whole pages. `req_to_host_pool` is int32 `[rows, width]`: the slot of
    each token, -1 for none. `req_to_host_pool_allocated_len` is int64 `[rows]`: tokens of each row that have slots, in
    whole pages. The caller owns both; only a successful allocation writes them."""

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
        Raises OutOfPages, which names the row that holds most, and InvalidInput if the row does not exist, is too
        narrow, or would have a gap. Nothing has changed then."""
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
        return row[start_pos:end].astype(np.int32)

    def allocated_host_indices(self, req_to_host_pool: Ids, req_pool_idx: int, allocated_len: int) -> Ids:
        """Slots of a row's first `allocated_len` tokens, rounded up to pages, for `free`; int32, a copy without -1.
        Raises InvalidInput if the row does not exist."""
        row = _row(req_to_host_pool, req_pool_idx, len(req_to_host_pool))
        if allocated_len < 0:
            raise InvalidInput(f"a row cannot have slots for {allocated_len} tokens.")
        found = row[: pages_for(int(allocated_len), self.page_size) * self.page_size]
        return found[found >= 0].astype(np.int32)


class HostTokenToKVPoolAllocator(HiSparseHostPoolMixin, PagedTokenToKVPoolAllocator):
    """Token slots of host frames, in pages of one or more tokens, as large as the device's."""


class HostedPages(HostTokenToKVPoolAllocator):
    """Page ids that are the frames of their pages in host memory. A slot is a whole page of `page_tokens` tokens, so a
    cache's rows of pages are the `req_to_host_pool` of the verbs above."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        super().__init__(num_pages, 1, name="pages")
        self._page_tokens = page_tokens

    def alloc_rows(self, table: Ids, rows: RowIds, before: Longs, after: Longs) -> Ids:
        have, end = -(-before // self._page_tokens), -(-after // self._page_tokens)
        lengths = np.zeros(len(table), dtype=np.int64)
        lengths[rows] = have
        pages = [NO_PAGES]
        try:
            for row, start, stop in zip(rows.tolist(), have.tolist(), end.tolist(), strict=True):
                pages.append(self.alloc_paged_token_slots(table, lengths, row, start, stop - start))
        except OutOfPages:
            self.free_pages(np.concatenate(pages))
            for row, start, stop in zip(rows.tolist(), have.tolist(), lengths[rows].tolist(), strict=True):
                table[row, start:stop] = 0
            raise
        return np.concatenate(pages)

    def pages_of_row(self, table: Ids, row: int, first: int, last: int) -> Ids:
        return self.allocated_host_indices(table, row, last)[first:]


def _row(req_to_host_pool: Ids, req_pool_idx: int, num_lengths: int) -> Ids:
    num_rows = min(len(req_to_host_pool), num_lengths)
    if not 0 <= req_pool_idx < num_rows:
        raise InvalidInput(f"row {req_pool_idx} does not exist; there are {num_rows} rows.")
    row: Ids = req_to_host_pool[req_pool_idx]
    return row
