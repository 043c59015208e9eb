"""Allocators: which pages are free and which are out. Bookkeeping on the host; no tensor, no bytes."""

from quire.memory.allocator.base import (
    AllocatorState,
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    token_allocator,
)
from quire.memory.allocator.frames import GroupFrames, PageFrames, SlotFrames, carried_frames, whole_frames
from quire.memory.allocator.mamba import MambaSlotAllocator
from quire.memory.allocator.slots import slots_in_pages
from quire.memory.allocator.swa import (
    GrowingAllocator,
    SWATokenToKVPoolAllocator,
    growing_allocator,
    passing_frames,
)

__all__ = [
    "AllocatorState",
    "BaseTokenToKVPoolAllocator",
    "GroupFrames",
    "GrowingAllocator",
    "MambaSlotAllocator",
    "PageFrames",
    "PagedTokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "SlotFrames",
    "TokenToKVPoolAllocator",
    "carried_frames",
    "growing_allocator",
    "passing_frames",
    "slots_in_pages",
    "token_allocator",
    "whole_frames",
]
