"""Which allocator hands out page ids, and which the frames of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator, IntArray
from quire.memory.allocator.mamba import MambaSlotAllocator
from quire.memory.allocator.page_frames import PageFrames
from quire.memory.allocator.paged import PagedTokenToKVPoolAllocator
from quire.memory.allocator.slot_frames import SlotFrames
from quire.memory.allocator.swa import SWATokenToKVPoolAllocator
from quire.memory.allocator.token import TokenToKVPoolAllocator
from quire.memory.residency import Column
from quire.spec.ids import Ids


def page_allocator(num_pages: int, page_size: int, name: str) -> BaseTokenToKVPoolAllocator:
    """Hands out ids of pages, or of frames that hold one page each."""
    if page_size == 1:
        return TokenToKVPoolAllocator(num_pages, name=name)
    return PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, name=name)


class GrowingAllocator(Protocol):
    """What grows a batch of sequences, and takes back the pages of those that end: all or nothing, on all its sides."""

    def available_size(self) -> int:
        """Tokens that could be handed out now, in whole pages."""

    def alloc(self, need_size: int) -> Ids:
        """Slots of so many tokens in whole pages."""

    def alloc_extend(self, prefix_lens: IntArray, seq_lens: IntArray, last_loc: IntArray) -> Ids:
        """Slots for sequences that grow from `prefix_lens` to `seq_lens` tokens, packed."""

    def alloc_decode(self, seq_lens: IntArray, last_loc: IntArray) -> Ids:
        """One more slot per sequence."""

    def free(self, free_index: IntArray) -> None:
        """Give back the pages of these slots."""

    def free_group_begin(self) -> None:
        """Collect the frees that follow."""

    def free_group_end(self) -> None:
        """Give back everything freed since."""


def growing_allocator(pages: BaseTokenToKVPoolAllocator, frames: Sequence[object]) -> GrowingAllocator:
    """What grows the batches of a cache with these groups of frames: the first that gives pages theirs early, with
    `pages` as its other side, or, where there is none, `pages` itself."""
    return next((each for each in frames if isinstance(each, SWATokenToKVPoolAllocator)), pages)


def whole_frames(table: Column, num_frames: int, pages: BaseTokenToKVPoolAllocator) -> PageFrames:
    """Frames of a group in which a page keeps its frame for as long as it exists."""
    return PageFrames(table, page_allocator(num_frames, pages.page_size, table.name))


def passing_frames(table: Column, num_frames: int, pages: BaseTokenToKVPoolAllocator) -> SWATokenToKVPoolAllocator:
    """Frames of a group in which pages lose theirs early; `pages` is the side that hands out the pages."""
    return SWATokenToKVPoolAllocator.over(pages, table, page_allocator(num_frames, pages.page_size, table.name))


def carried_frames(table: Column, num_frames: int) -> SlotFrames:
    """Frames of a group of which each request carries one along."""
    return SlotFrames(table, MambaSlotAllocator(num_frames, name=table.name))
