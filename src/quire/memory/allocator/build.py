"""Which allocator hands out page ids, and which the frames of a group."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator, token_allocator
from quire.memory.allocator.frames import PageFrames, SlotFrames
from quire.memory.allocator.mamba import MambaSlotAllocator
from quire.memory.allocator.swa import SWATokenToKVPoolAllocator
from quire.memory.residency import Column

GrowingAllocator = BaseTokenToKVPoolAllocator | SWATokenToKVPoolAllocator
"""What grows a batch of sequences, and takes back the pages of those that end: all or nothing, on all its sides."""


def growing_allocator(pages: BaseTokenToKVPoolAllocator, frames: Sequence[object]) -> GrowingAllocator:
    """What grows the batches of a cache with these groups of frames: the first that gives pages theirs early, with
    `pages` as its other side, or, where there is none, `pages` itself."""
    return next((each for each in frames if isinstance(each, SWATokenToKVPoolAllocator)), pages)


def whole_frames(table: Column, num_frames: int, pages: BaseTokenToKVPoolAllocator) -> PageFrames:
    """Frames of a group in which a page keeps its frame for as long as it exists."""
    size = pages.page_size
    return PageFrames(table, token_allocator(num_frames * size, size, name=table.name))


def passing_frames(table: Column, num_frames: int, pages: BaseTokenToKVPoolAllocator) -> SWATokenToKVPoolAllocator:
    """Frames of a group in which pages lose theirs early; `pages` is the side that hands out the pages."""
    size = pages.page_size
    return SWATokenToKVPoolAllocator(pages.size, num_frames * size, size, name=table.name, full=pages, table=table)


def carried_frames(table: Column, num_frames: int) -> SlotFrames:
    """Frames of a group of which each request carries one along."""
    return SlotFrames(table, MambaSlotAllocator(num_frames, name=table.name))
