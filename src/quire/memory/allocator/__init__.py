"""Allocators: which pages are free and which are out. Bookkeeping on the host; no tensor, no bytes."""

from quire.memory.allocator.base import AllocatorState, BaseTokenToKVPoolAllocator, slots_in_pages
from quire.memory.allocator.build import (
    GrowingAllocator,
    carried_frames,
    growing_allocator,
    page_allocator,
    passing_frames,
    whole_frames,
)
from quire.memory.allocator.mamba import MambaSlotAllocator
from quire.memory.allocator.page_frames import PageFrames
from quire.memory.allocator.paged import PagedTokenToKVPoolAllocator
from quire.memory.allocator.slot_frames import SlotFrames
from quire.memory.allocator.swa import SWATokenToKVPoolAllocator
from quire.memory.allocator.token import TokenToKVPoolAllocator

__all__ = [
    "AllocatorState",
    "BaseTokenToKVPoolAllocator",
    "GrowingAllocator",
    "MambaSlotAllocator",
    "PageFrames",
    "PagedTokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "SlotFrames",
    "TokenToKVPoolAllocator",
    "carried_frames",
    "growing_allocator",
    "page_allocator",
    "passing_frames",
    "slots_in_pages",
    "whole_frames",
]
