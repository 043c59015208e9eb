"""PageFrames: the frames of one group, given to pages that exist already. Bookkeeping only, on the host."""

from __future__ import annotations

import numpy as np

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator
from quire.memory.frames import FrameTable
from quire.spec.ids import Bools, Ids, Tier


class PageFrames:
    """Which pages have a frame in one (tier, group), and which of its frames are free.

    It owns `allocator`, whose pages are the frames, and is the only writer of one column of `frames`. A page that has a
    frame here is resident; whose the page is, is no concern of this class. Page ids are distinct within a call.
    """

    def __init__(self, frames: FrameTable, tier: Tier, group: int, allocator: BaseTokenToKVPoolAllocator) -> None:
        self.frames = frames
        self.tier = tier
        self.group = group
        self.allocator = allocator

    @property
    def name(self) -> str:
        """The group's name, for messages."""
        return self.allocator.name

    @property
    def num_frames(self) -> int:
        """Frames of the group, the padding frame not counted."""
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        """Frames that `take` could give out now."""
        return self.allocator.num_free_pages

    @property
    def column(self) -> Ids:
        """The live column of the frame table, int32 `[num_pages + 1]`: frame of each page, 0 where it has none."""
        return self.frames.column(self.tier, self.group)

    def is_out(self, frame_ids: Ids) -> Bools:
        """Per frame id: whether it is given out."""
        return self.allocator.is_out(frame_ids)

    def resident(self, pages: Ids) -> Bools:
        """Per page: whether it has a frame."""
        return self.frames.resident(self.tier, self.group, pages)

    def take(self, pages: Ids) -> None:
        """Give each of these pages a frame; none of them has one. Raises OutOfPages, changing nothing."""
        self.frames.bind(self.tier, self.group, pages, self.allocator.alloc_pages(len(pages)))

    def drop(self, pages: Ids) -> Ids:
        """Take the frames of these pages away, free again at once, in ascending order; returns the pages that had one.

        Pages without a frame are passed over.
        """
        had: Ids = pages[self.resident(pages)]
        self.allocator.free_pages(np.sort(self.frames.unbind(self.tier, self.group, had)))
        return had

    def hand_over(self, old_pages: Ids, new_pages: Ids) -> None:
        """The frames of `old_pages`, all resident, become those of `new_pages`, none resident, in order.

        No frame is given out or comes back.
        """
        self.frames.move(self.tier, self.group, old_pages, new_pages)
