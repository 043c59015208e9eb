"""Which allocator hands out page ids, and which the frames of a group."""

from __future__ import annotations

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator
from quire.memory.allocator.mamba import MambaSlotAllocator
from quire.memory.allocator.page_frames import PageFrames
from quire.memory.allocator.paged import PagedTokenToKVPoolAllocator
from quire.memory.allocator.slot_frames import SlotFrames
from quire.memory.allocator.swa import SWATokenToKVPoolAllocator
from quire.memory.allocator.token import TokenToKVPoolAllocator
from quire.memory.residency import Column


def page_allocator(num_pages: int, page_size: int, name: str) -> BaseTokenToKVPoolAllocator:
    """Hands out ids of pages, or of frames that hold one page each."""
    if page_size == 1:
        return TokenToKVPoolAllocator(num_pages, name=name)
    return PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, name=name)


def whole_frames(table: Column, num_frames: int, pages: BaseTokenToKVPoolAllocator) -> PageFrames:
    """Frames of a group in which a page keeps its frame for as long as it exists."""
    return PageFrames(table, page_allocator(num_frames, pages.page_size, table.name))


def passing_frames(table: Column, num_frames: int, pages: BaseTokenToKVPoolAllocator) -> SWATokenToKVPoolAllocator:
    """Frames of a group in which pages lose theirs early; `pages` is the side that hands out the pages."""
    return SWATokenToKVPoolAllocator.over(pages, table, page_allocator(num_frames, pages.page_size, table.name))


def carried_frames(table: Column, num_frames: int) -> SlotFrames:
    """Frames of a group of which each request carries one along."""
    return SlotFrames(table, MambaSlotAllocator(num_frames, name=table.name))
