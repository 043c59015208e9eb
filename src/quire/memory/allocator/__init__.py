"""Allocators: which ids are free and which are allocated. Bookkeeping on the host; no tensor, no bytes."""

from quire.memory.allocator.arena import Arena as Arena
from quire.memory.allocator.arena import Move as Move
from quire.memory.allocator.base import BaseTokenToKVPoolAllocator as BaseTokenToKVPoolAllocator
from quire.memory.allocator.base import PagedTokenToKVPoolAllocator as PagedTokenToKVPoolAllocator
from quire.memory.allocator.base import TokenToKVPoolAllocator as TokenToKVPoolAllocator
from quire.memory.allocator.base import slots_in_pages as slots_in_pages
from quire.memory.allocator.base import token_allocator as token_allocator
from quire.memory.allocator.device import DeviceFrames as DeviceFrames
from quire.memory.allocator.frames import GroupFrames as GroupFrames
from quire.memory.allocator.frames import PageFrames as PageFrames
from quire.memory.allocator.frames import PageIdFrames as PageIdFrames
from quire.memory.allocator.frames import SlotFrames as SlotFrames
from quire.memory.allocator.mamba import MambaSlotAllocator as MambaSlotAllocator
from quire.memory.allocator.swa import GrowingAllocator as GrowingAllocator
from quire.memory.allocator.swa import SWATokenToKVPoolAllocator as SWATokenToKVPoolAllocator
