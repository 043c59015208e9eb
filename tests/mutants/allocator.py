"""Mistakes of allocators and residency tables."""

from __future__ import annotations

import numpy as np

from quire.cache.groups import PagedGroup
from quire.cache.states import StateGroup
from quire.memory.allocator import BaseTokenToKVPoolAllocator, PageFrames
from quire.memory.allocator.id_pool import IdPool
from quire.memory.residency import Column
from quire.spec.ids import Ids
from tests.mutants import field
from tests.mutants.registry import Patch, mutant


@mutant("cache", field.PADDING)
def padding_page_is_handed_out(patch: Patch) -> None:
    """Page 0 is handed out, and padded tokens overwrite a request."""
    real = BaseTokenToKVPoolAllocator.clear

    def clear(allocator: BaseTokenToKVPoolAllocator) -> None:
        real(allocator)
        allocator.ids._ring -= 1

    patch.setattr(BaseTokenToKVPoolAllocator, "clear", clear)


@mutant("cache", field.LEAK)
def frames_are_dropped_and_not_freed(patch: Patch) -> None:
    """Frames of pages that leave the cache are lost, a few with each eviction."""

    def drop(group: PageFrames, pages: Ids) -> None:
        group.allocator.free_pages(group.table.unbind(pages)[1:])

    patch.setattr(PageFrames, "drop", drop)


@mutant("cache", field.STALE)
def freed_pages_keep_their_frames(patch: Patch) -> None:
    """A page that was freed still has a frame, which is now another request's."""

    def drop(group: PageFrames, pages: Ids) -> None:
        group.allocator.free_pages(np.sort(group.table.frame[pages[group.table.present(pages)]]))

    patch.setattr(PageFrames, "drop", drop)


@mutant("cache", field.TWICE)
def a_frame_moves_and_stays(patch: Patch) -> None:
    """A frame handed to another page is still the first one's too, and is freed twice."""
    real = Column.move

    def move(table: Column, old_pages: Ids, new_pages: Ids) -> None:
        frames = table.frame[old_pages]
        real(table, old_pages, new_pages)
        table.frame[old_pages] = frames

    patch.setattr(Column, "move", move)


@mutant("cache", field.TWICE)
def the_free_list_loses_its_place(patch: Patch) -> None:
    """The free list wraps around and hands the same pages out twice."""

    real = IdPool.put

    def put(pool: IdPool, ids: Ids) -> None:
        head = pool._head
        real(pool, ids)
        pool._head = head

    patch.setattr(IdPool, "put", put)


@mutant("cache", field.LEAK)
def a_failed_allocation_keeps_what_it_has(patch: Patch) -> None:
    """When a group runs out half way, the pages of the others are lost."""
    patch.setattr(PagedGroup, "untake", lambda group, pages: None)
    patch.setattr(StateGroup, "untake", lambda group, pages: None)
