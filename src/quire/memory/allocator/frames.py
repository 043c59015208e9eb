"""The frames of one (tier, group): an allocator of frames, and the column that maps pages to frames.

    PageFrames      each page gets a frame of the group's own
    PageIdFrames    a page's frame is in host memory, and has the number of the page: latents beside hot buffers
    SlotFrames      requests allocate frames, and pages get them when a request stores one

Callers ask a group's frames and not where these live: each class does what is right for its frames.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import numpy as np

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator
from quire.memory.allocator.id_pool import IdPool
from quire.memory.allocator.mamba import MambaSlotAllocator
from quire.memory.residency import Column
from quire.memory.runs import IdArray, in_order
from quire.spec.ids import Ids

NO_IDS: Ids = np.empty(0, dtype=np.int32)

A = TypeVar("A", bound=BaseTokenToKVPoolAllocator | MambaSlotAllocator)


class GroupFrames(Generic[A]):
    """An allocator whose ids are the frames of `table`, without the padding frame. Page ids are distinct in a call."""

    are_page_ids = False
    """Whether a page has the frame of its own number, in host memory, which the device reads there."""

    def __init__(self, table: Column, allocator: A) -> None:
        self.table = table
        self.allocator = allocator
        self.name = allocator.name
        self.num_frames = allocator.ids.size
        """The largest id that a frame may ever have: the most frames, but in an arena."""

    @property
    def num_free(self) -> int:
        """Frames that are free now, without those set aside for a batch."""
        return self.allocator.ids.num_free

    @property
    def num_used(self) -> int:
        """Frames that are not free."""
        return self.allocator.ids.num_used

    @property
    def num_released(self) -> int:
        """Frames beyond the limit that are not in use: the system may have their memory."""
        return self.allocator.ids.num_withdrawn

    @abstractmethod
    def free_frames(self, frames: Ids) -> None:
        """Free frames that no page has."""

    def drop(self, pages: Ids) -> None:
        """Free the frames of these pages, in ascending order. Pages without a frame are skipped."""
        self.free_frames(in_order(self.table.unbind(pages)))

    def take_unchecked(self) -> Ids:
        """Pages that came to the device with records that nothing has checked, since the last call."""
        return NO_IDS


class PageFrames(GroupFrames[BaseTokenToKVPoolAllocator]):
    """Frames for pages that exist already. The pages of the allocator are the frames."""

    def take(self, pages: Ids) -> Ids:
        """Give each of these pages a frame, and return the frames. Raises OutOfPages, changing nothing."""
        frames = self.allocator.alloc_pages(len(pages))
        self.table.bind(pages, frames)
        return frames

    def free_frames(self, frames: Ids) -> None:
        self.allocator.free_pages(frames)

    def vacate(self, pages: IdArray) -> None:
        """As `drop`, but the pages stay."""
        self.drop(pages.astype(np.int32, copy=False))

    def move(self, old_pages: Ids, new_pages: Ids) -> None:
        """Move the frames of `old_pages` to `new_pages`, which have none, in order."""
        self.table.move(old_pages, new_pages)


class PageIdFrames(PageFrames):
    """Frames in host memory that are the ids of their pages: frame i is there for as long as `pages` has allocated page
    i. The table says which pages are read here."""

    are_page_ids = True

    def __init__(self, table: Column, pages: BaseTokenToKVPoolAllocator) -> None:
        super().__init__(table, pages)
        self.name = table.name
        self._unchecked: list[Ids] = []
        self._num_bound = 0

    @property
    def num_free(self) -> int:
        """Frames of pages that are not in the table."""
        return self.num_frames - self._num_bound

    @property
    def num_used(self) -> int:
        return self._num_bound

    def take(self, pages: Ids) -> Ids:
        self.table.bind(pages, pages)
        self._num_bound += len(pages)
        return pages

    def drop(self, pages: Ids) -> None:
        self._num_bound -= len(self.table.unbind(pages))

    def move(self, old_pages: Ids, new_pages: Ids) -> None:
        """As `PageFrames.move`, but `new_pages` have frames of their own, with the same content unless damaged."""
        self.drop(old_pages)
        self._unchecked.append(self.take(new_pages))

    def take_unchecked(self) -> Ids:
        """Pages that `move` has brought here with their own records."""
        found, self._unchecked = np.concatenate([NO_IDS, *self._unchecked]), []
        return found


class SlotFrames(GroupFrames[MambaSlotAllocator]):
    """Frames that requests allocate, and that the table gets when a request stores one with a page."""

    def __init__(self, table: Column, num_frames: int, ids: IdPool | None = None) -> None:
        super().__init__(table, MambaSlotAllocator(num_frames, name=table.name, ids=ids))

    def free_frames(self, frames: Ids) -> None:
        self.allocator.free(frames)
