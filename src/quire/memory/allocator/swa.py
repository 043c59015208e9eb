"""Token slots of models that mix full and sliding-window layers: two sides, one page id. Bookkeeping only, on the host.

Callers hold slots of the full side. A page of the full side also has a page of the window side while a window of some
token covers it. The map between them is a column of the residency table.
"""

from __future__ import annotations

import sys
from typing import Final, TypeAlias

import numpy as np

from quire.errors import InvalidFree, InvalidInput, OutOfPages
from quire.memory.allocator.base import (
    BaseTokenToKVPoolAllocator,
    IntArray,
    Longs,
    TokenSlots,
    slot_array,
    slots_behind,
    token_allocator,
)
from quire.memory.allocator.frames import PageFrames
from quire.memory.allocator.id_pool import IdPool
from quire.memory.residency import Column
from quire.memory.runs import IdArray
from quire.spec.ids import Ids
from quire.spec.pages import pages_for

UNLIMITED: Final = sys.maxsize
"""Free tokens of a full side that does not exist, so that it limits no allocation."""

SWAState: TypeAlias = tuple[IdPool, IdPool, Ids]
"""A snapshot by `backup_state`, for `restore_state` of the same allocator: both sides and the map."""


class SWATokenToKVPoolAllocator(TokenSlots, PageFrames):
    """Allocates token slots of the full side with window pages for them, all or nothing. `size` and `size_swa` are
    tokens of each side, rounded down to whole pages. As a `PageFrames` it is the group of the windows.

    With `size` 0 there is no full side: every layer of the model has a window. A page then has the id of its window
    page, and `free_swa` and `free` are the same.

    `full` is a full side that other callers allocate from too, with nothing allocated yet; `table` is the column of the
    map. Pages allocated from `full` directly get their windows by `take`. `clear` and `restore_state` reset `full` too.
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
    ) -> None:
        swa = token_allocator(size_swa, page_size, need_sort=need_sort, name=name)
        if full is None:
            full = token_allocator(size, page_size, need_sort=need_sort) if size else swa
        super().__init__(Column(name, full.num_pages, reclaims=True) if table is None else table, swa)
        assert full.page_size == swa.page_size, "two sides with pages of different sizes"
        assert full.num_pages <= self.table.num_pages, "pages beyond the table"
        self.full_attn_allocator = full
        self.swa_attn_allocator = swa
        self.page_size = page_size
        self.size_swa = swa.size
        self._windows_only = full is swa
        self.size = 0 if self._windows_only else full.size
        self._sides = (swa,) if self._windows_only else (swa, full)
        self.clear()

    @property
    def full_to_swa_page_mapping(self) -> Ids:
        """Page of the window side by page of the full side; see `Column.mapping`."""
        return self.table.mapping

    def full_available_size(self) -> int:
        """Free tokens of the full side; `UNLIMITED` if there is none."""
        return UNLIMITED if self._windows_only else self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        """Free tokens of the window side."""
        return self.swa_attn_allocator.available_size()

    def available_size(self) -> int:
        """Tokens free on both sides."""
        return min(self.full_available_size(), self.swa_available_size())

    def clear(self) -> None:
        """Free everything, on both sides."""
        self.table.unbind(self._mapped(self.table.frame))
        for side in self._sides:
            side.clear()

    def backup_state(self) -> SWAState:
        """A snapshot of both sides and the map. O(pages). Not inside a free group."""
        full, swa = self.full_attn_allocator.backup_state(), self.swa_attn_allocator.backup_state()
        return full, swa, self.table.frame.copy()

    def restore_state(self, state: SWAState) -> None:
        """Return to the state of `backup_state`."""
        full, swa, column = state
        assert len(column) == len(self.table.frame), "a snapshot of another allocator"
        self.full_attn_allocator.restore_state(full)
        self.swa_attn_allocator.restore_state(swa)
        self.table.unbind(self._mapped(self.table.frame))
        pages = self._mapped(column)
        self.table.bind(pages, column[pages])

    # -- allocation: both sides are checked before either changes

    def alloc_pages(self, num_pages: int) -> Ids:
        """Pages with their windows. Raises OutOfPages with the name of the short side, changing nothing."""
        self._check_room(num_pages)
        pages = self.full_attn_allocator.alloc_pages(num_pages)
        if self._windows_only:
            self.table.bind(pages, pages)
            return pages
        try:
            self.take(pages)
        except OutOfPages:
            self.full_attn_allocator.free_pages(pages)
            raise
        return pages

    def alloc_extend_swa_tail(
        self,
        prefix_lens: IntArray,
        seq_lens: IntArray,
        last_loc: IntArray,
        extend_num_tokens: int | None,
        swa_tail_len: int,
    ) -> Ids:
        """Slots for one sequence that grows by tokens of which only the last `swa_tail_len` need windows.

            |-- prefix --|-- rest of its page --|-- full side only --|-- both sides --|
                                                                     page of the tail's first token

        If the tail is longer than the extension, it is the whole extension. Without a full side, tokens before the
        tail's pages get slots of the padding page, which must not be freed. Errors as for `alloc_extend`.
        """
        full, size = self.full_attn_allocator, self.page_size
        prefix, seq, last = self._check_lengths(prefix_lens, seq_lens, last_loc, extend_num_tokens)
        if len(prefix) != 1 or swa_tail_len < 0:
            raise InvalidInput(f"one sequence and its tail: got {len(prefix)} and a tail of {swa_tail_len} tokens.")
        start, end = prefix.item(), seq.item()
        tail = max(start, end - swa_tail_len)
        first_new, stop = pages_for(start, size), pages_for(end, size)
        first_mapped = max(first_new, tail // size if tail < end else stop)
        if min(end, first_new * size) > (start if self._windows_only else tail):
            self._check_windows(last)
        pages = np.zeros(stop - first_new, dtype=np.int32)  # the padding page, if there is no full side
        mapped = pages[first_mapped - first_new :]
        if self._windows_only:
            mapped[:] = self.alloc_pages(len(mapped))
        else:
            full.ids.check_room(len(pages))
            self.swa_attn_allocator.ids.check_room(len(mapped))
            pages[:] = full.alloc_pages(len(pages))
            self.take(mapped)
        return slots_behind(last.item(), start, end, pages, size)

    # -- giving back

    def free(self, free_index: IntArray) -> None:
        """Free the whole pages of these slots, on both sides; their windows may be free already. Raises InvalidFree,
        changing nothing, if a page is not allocated."""
        pages = self.full_attn_allocator.pages_of(slot_array(free_index))
        if self._windows_only:
            self.full_attn_allocator.ids.check_out(pages)
        else:
            self.full_attn_allocator.free_pages(pages)
        self.drop(pages.astype(np.int32))

    def free_swa(self, free_index: IntArray) -> None:
        """Free the windows of the pages of these slots; the pages stay allocated and map to 0. Raises InvalidFree,
        changing nothing, if a page is not allocated or has no window."""
        found = self.full_attn_allocator.pages_of(slot_array(free_index))
        self.full_attn_allocator.ids.check_out(found)
        pages = found.astype(np.int32)
        gone = pages[~self.table.present(pages)]
        if len(gone):
            raise InvalidFree(
                f"group '{self.name}': the window of page {int(gone[0])} given back, but it has none (freed twice?)."
            )
        self.drop(pages)

    def vacate(self, pages: Ids) -> None:
        """As `free_swa`, by page."""
        if len(pages):
            self.free_swa(pages * np.int32(self.page_size))

    def free_group_begin(self) -> None:
        """Collect the frees that follow, on both sides. The map loses a window at its free."""
        for side in self._sides:
            side.free_group_begin()

    def free_group_end(self) -> None:
        """Free on both sides what was collected since `free_group_begin`."""
        for side in self._sides:
            side.free_group_end()

    def _mapped(self, column: Ids) -> Ids:
        return np.flatnonzero(column).astype(np.int32)

    def _check_room(self, num_pages: int) -> None:
        self.full_attn_allocator.ids.check_room(num_pages)
        self.swa_attn_allocator.ids.check_room(num_pages)

    def _check_continued(self, prefix: Longs, seq: Longs, last: Longs) -> None:
        self._check_windows(last[(prefix % self.page_size > 0) & (seq > prefix)])

    def _check_windows(self, slots: IdArray) -> None:
        """Raises InvalidInput if a sequence continues in a page without a window."""
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


def page_frames(table: Column, num_frames: int, pages: BaseTokenToKVPoolAllocator, *, whole: bool) -> PageFrames:
    """Frames of a group for the pages of `pages`. Unless it is read as a `whole`, a page may lose its frame early."""
    size, name = pages.page_size, table.name
    if whole:
        return PageFrames(table, token_allocator(num_frames * size, size, name=name))
    return SWATokenToKVPoolAllocator(pages.size, num_frames * size, size, name=name, full=pages, table=table)
