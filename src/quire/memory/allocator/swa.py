"""Token slots of models that mix full and sliding-window layers: two sides, one page id. Bookkeeping only, on the host.

Callers hold slots of the full side. A page of the full side also has a page of the window side while a window of some
token covers it. The map between them is a column of the residency table.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from quire.errors import InvalidFree, InvalidInput, OutOfPages
from quire.memory.allocator.base import (
    BaseTokenToKVPoolAllocator,
    IntArray,
    Longs,
    TokenSlots,
    slot_array,
    token_allocator,
)
from quire.memory.allocator.frames import PageFrames
from quire.memory.allocator.id_pool import IdPool
from quire.memory.residency import Column
from quire.memory.runs import IdArray
from quire.spec.ids import Ids


class SWATokenToKVPoolAllocator(TokenSlots, PageFrames):
    """Allocates token slots of the full side with window pages for them, all or nothing. `size` and `size_swa` are
    tokens of each side, rounded down to whole pages. As a `PageFrames` it is the group of the windows.

    `full` is a full side that other callers allocate from too, with nothing allocated yet; `table` is the column of the
    map. Pages allocated from `full` directly get their windows by `take`. `clear` resets `full` too. `ids` are those of
    the window side in an arena.
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        *,
        need_sort: bool = False,
        name: str = "window",
        full: BaseTokenToKVPoolAllocator | None = None,
        table: Column | None = None,
        ids: IdPool | None = None,
    ) -> None:
        swa = token_allocator(size_swa, page_size, need_sort=need_sort, name=name, ids=ids)
        if full is None:
            full = token_allocator(size, page_size, need_sort=need_sort)
        super().__init__(Column(name, full.num_pages, reclaims=True) if table is None else table, swa)
        assert full.page_size == swa.page_size, "two sides with pages of different sizes"
        assert full.num_pages <= self.table.num_pages, "pages beyond the table"
        self.full_attn_allocator = full
        self.swa_attn_allocator = swa
        self.page_size = page_size
        self.size, self.size_swa = full.size, swa.size
        self.clear()

    @property
    def full_to_swa_page_mapping(self) -> Ids:
        """Page of the window side by page of the full side; see `Column.mapping`."""
        return self.table.mapping

    def full_available_size(self) -> int:
        """Free tokens of the full side."""
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        """Free tokens of the window side."""
        return self.swa_attn_allocator.available_size()

    def available_size(self) -> int:
        """Tokens free on both sides."""
        return min(self.full_available_size(), self.swa_available_size())

    def clear(self) -> None:
        """Free everything, on both sides."""
        self.table.unbind(np.flatnonzero(self.table.frame).astype(np.int32))
        self.swa_attn_allocator.clear()
        self.full_attn_allocator.clear()

    def alloc_pages(self, num_pages: int) -> Ids:
        """Pages with their windows. Raises OutOfPages with the name of the short side, changing nothing."""
        self._check_room(num_pages)
        pages = self.full_attn_allocator.alloc_pages(num_pages)
        try:
            self.take(pages)
        except OutOfPages:
            self.full_attn_allocator.free_pages(pages)
            raise
        return pages

    def free(self, free_index: IntArray) -> None:
        """Free the whole pages of these slots, on both sides; their windows may be free already. Raises InvalidFree,
        changing nothing, if a page is not allocated."""
        pages = self.full_attn_allocator.pages_of(slot_array(free_index))
        self.full_attn_allocator.free_pages(pages)
        self.drop(pages.astype(np.int32))

    def vacate(self, pages: IdArray) -> None:
        """Free the windows of these pages, which stay. Raises InvalidFree, changing nothing, if one has no window."""
        self.full_attn_allocator.ids.check_out(pages)
        pages = pages.astype(np.int32, copy=False)
        gone = pages[~self.table.present(pages)]
        if len(gone):
            raise InvalidFree(
                f"group '{self.name}': the window of page {int(gone[0])} given back, but it has none (freed twice?)."
            )
        self.drop(pages)

    def free_group_begin(self) -> None:
        """Collect the frees that follow, on both sides. The map loses a window at its free."""
        self.swa_attn_allocator.free_group_begin()
        self.full_attn_allocator.free_group_begin()

    def free_group_end(self) -> None:
        """Free on both sides what was collected since `free_group_begin`."""
        self.swa_attn_allocator.free_group_end()
        self.full_attn_allocator.free_group_end()

    def _check_room(self, num_pages: int) -> None:
        self.full_attn_allocator.ids.check_room(num_pages)
        self.swa_attn_allocator.ids.check_room(num_pages)

    def _check_continued(self, prefix: Longs, seq: Longs, last: Longs) -> None:
        slots = last[(prefix % self.page_size > 0) & (seq > prefix)]
        if not len(slots):
            return
        pages = slots // self.page_size
        inside = (pages >= 1) & (pages <= self.table.num_pages)
        wrong = pages[~inside | (self.full_to_swa_page_mapping[np.where(inside, pages, 0)] == 0)]
        if len(wrong):
            raise InvalidInput(
                f"group '{self.name}': a sequence goes on inside page {int(wrong[0])}, which has no window.",
                fix="free the windows of pages only that every token to come has left behind.",
            )


GrowingAllocator: TypeAlias = BaseTokenToKVPoolAllocator | SWATokenToKVPoolAllocator
"""Grows a batch of sequences and frees the pages of those that end, on all sides or on none."""
