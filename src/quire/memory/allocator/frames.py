"""The frames of one (tier, group): how many, which are free, which page has which. Bookkeeping only, on the host."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator
from quire.memory.allocator.mamba import MambaSlotAllocator
from quire.memory.residency import Column
from quire.memory.runs import in_order
from quire.spec.ids import Bools, Ids

A = TypeVar("A", bound=BaseTokenToKVPoolAllocator | MambaSlotAllocator)


class GroupFrames(Generic[A]):
    """It owns `allocator`, whose ids are the frames, and is the only writer of frames into `table`.

    A page that has a frame here is resident; whose the page is, is no concern of this class. Page ids are distinct
    within a call. `num_frames` does not count the padding frame.
    """

    def __init__(self, table: Column, allocator: A) -> None:
        self.table = table
        self.allocator = allocator
        self.name = allocator.name
        self.num_frames = allocator.ids.size

    @property
    def num_free(self) -> int:
        """Frames that belong to nobody."""
        return self.allocator.ids.num_free

    @property
    def column(self) -> Ids:
        """The live frames of the table, int32 `[num_pages + 1]`: frame of each page, 0 where it has none."""
        return self.table.frame

    def is_out(self, frame_ids: Ids | slice) -> Bools:
        """Per frame id: whether it is given out."""
        return self.allocator.is_out(frame_ids)

    def resident(self, pages: Ids) -> Bools:
        """Per page: whether it has a frame."""
        return self.table.present(pages)


class PageFrames(GroupFrames[BaseTokenToKVPoolAllocator]):
    """Frames that are given to pages which exist already: pages of the allocator are the frames."""

    def take(self, pages: Ids) -> Ids:
        """Give each of these pages a frame, and return them; none has one. Raises OutOfPages, changing nothing."""
        frames = self.allocator.alloc_pages(len(pages))
        self.table.bind(pages, frames)
        return frames

    def drop(self, pages: Ids) -> None:
        """Take the frames of these pages away, free again at once, in ascending order. Pages without a frame are passed
        over."""
        self.allocator.free_pages(in_order(self.table.unbind(pages)))

    def vacate(self, pages: Ids) -> None:
        """As `drop`, where the pages stay."""
        self.drop(pages)

    def hand_over(self, old_pages: Ids, new_pages: Ids) -> None:
        """The frames of `old_pages`, all resident, become those of `new_pages`, none resident, in order.

        No frame is given out or comes back.
        """
        self.table.move(old_pages, new_pages)


class SlotFrames(GroupFrames[MambaSlotAllocator]):
    """Frames that are requests' own first, and pages' when they are left behind."""

    @property
    def num_free(self) -> int:
        """Frames that belong to nobody, and were not set aside."""
        return self.allocator.available_size()

    def take(self, num_frames: int) -> Ids:
        """Frames for requests, which own them. Raises OutOfPages, changing nothing."""
        return self.allocator.alloc(num_frames)

    def free(self, frame_ids: Ids) -> None:
        """Give back frames that requests own. Raises InvalidFree, changing nothing, if one is not out."""
        self.allocator.free(frame_ids)

    def set_aside(self, num_frames: int) -> None:
        """Frames for a batch; `take_aside` or `untake` has to follow. Raises OutOfPages, changing nothing."""
        self.allocator.alloc_group_begin(num_frames)

    def take_aside(self) -> Ids:
        """The frames that were set aside; requests own them."""
        frames = self.allocator.alloc(self.allocator.num_set_aside)
        self.allocator.alloc_group_end()
        return frames

    def untake(self) -> None:
        """Give back what was set aside."""
        self.allocator.alloc_group_end()

    def leave(self, pages: Ids, frame_ids: Ids) -> None:
        """These frames, which requests owned, are those of these pages now, none of which had one."""
        self.table.bind(pages, frame_ids)

    def take_over(self, pages: Ids) -> Ids:
        """The frames of these pages, all resident, become their caller's; the pages have none."""
        frames = self.table.unbind(pages)
        assert len(frames) == len(pages), "a page without a frame was taken over"
        return frames

    def drop(self, pages: Ids) -> None:
        """Take the frames of these pages away, free again at once. Pages without a frame are passed over."""
        self.allocator.free(np.sort(self.table.unbind(pages)))
