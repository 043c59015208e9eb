"""The frames of one (tier, group): an allocator of frames, and the column that maps pages to frames."""

from __future__ import annotations

from typing import Generic, TypeVar

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator
from quire.memory.allocator.mamba import MambaSlotAllocator
from quire.memory.residency import Column
from quire.memory.runs import in_order
from quire.spec.ids import Ids

A = TypeVar("A", bound=BaseTokenToKVPoolAllocator | MambaSlotAllocator)


class GroupFrames(Generic[A]):
    """An allocator whose ids are the frames of `table`, without the padding frame. Page ids are distinct in a call."""

    def __init__(self, table: Column, allocator: A) -> None:
        self.table = table
        self.allocator = allocator
        self.name = allocator.name
        self.num_frames = allocator.ids.size

    @property
    def num_free(self) -> int:
        """Frames that are free now, without those set aside for a batch."""
        return self.allocator.ids.num_free


class PageFrames(GroupFrames[BaseTokenToKVPoolAllocator]):
    """Frames for pages that exist already. The pages of the allocator are the frames."""

    def take(self, pages: Ids) -> Ids:
        """Give each of these pages a frame, and return the frames. Raises OutOfPages, changing nothing."""
        frames = self.allocator.alloc_pages(len(pages))
        self.table.bind(pages, frames)
        return frames

    def drop(self, pages: Ids) -> None:
        """Free the frames of these pages, in ascending order. Pages without a frame are skipped."""
        self.allocator.free_pages(in_order(self.table.unbind(pages)))

    def vacate(self, pages: Ids) -> None:
        """As `drop`, but the pages stay."""
        self.drop(pages)

    def move(self, old_pages: Ids, new_pages: Ids) -> None:
        """Move the frames of `old_pages` to `new_pages`, which have none, in order."""
        self.table.move(old_pages, new_pages)


class PageIdFrames(PageFrames):
    """Frames in host memory that are the ids of their pages: frame i is there for as long as `pages` has allocated page
    i. The table says which pages are read here."""

    def __init__(self, table: Column, pages: BaseTokenToKVPoolAllocator) -> None:
        super().__init__(table, pages)
        self.name = table.name
        self.unchecked: list[Ids] = []  # pages that `move` has brought here with their own records
        self._num_bound = 0

    @property
    def num_free(self) -> int:
        """Frames of pages that are not in the table."""
        return self.num_frames - self._num_bound

    def take(self, pages: Ids) -> Ids:
        self.table.bind(pages, pages)
        self._num_bound += len(pages)
        return pages

    def drop(self, pages: Ids) -> None:
        self._num_bound -= len(self.table.unbind(pages))

    def move(self, old_pages: Ids, new_pages: Ids) -> None:
        """As `PageFrames.move`, but the frames of `new_pages` are their own: they have the same content, if it is not
        damaged."""
        self.drop(old_pages)
        self.unchecked.append(self.take(new_pages))


class SlotFrames(GroupFrames[MambaSlotAllocator]):
    """Frames that requests allocate, and that the table gets when a request stores one with a page."""

    def __init__(self, table: Column, num_frames: int) -> None:
        super().__init__(table, MambaSlotAllocator(num_frames, name=table.name))

    def drop(self, pages: Ids) -> None:
        """As `PageFrames.drop`."""
        self.allocator.free(in_order(self.table.unbind(pages)))
