"""SlotFrames: the frames of a group whose frames belong to requests first, and to pages when they are left behind."""

from __future__ import annotations

import numpy as np

from quire.memory.allocator.mamba import MambaSlotAllocator
from quire.memory.frames import FrameTable
from quire.spec.ids import Bools, Ids, Tier


class SlotFrames:
    """Takes frames for requests, and says which page has which of those that were left behind.

    It owns `allocator`, and is the only writer of one column of `frames`.
    """

    def __init__(self, frames: FrameTable, tier: Tier, group: int, allocator: MambaSlotAllocator) -> None:
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
        return self.allocator.num_frames

    @property
    def num_free(self) -> int:
        """Frames that `take` could give out now."""
        return self.allocator.num_free

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

    def take(self, num_frames: int) -> Ids:
        """Frames for requests, which own them. Raises OutOfPages, changing nothing."""
        return self.allocator.alloc(num_frames)

    def free(self, frame_ids: Ids) -> None:
        """Give back frames that requests own. Raises InvalidFree, changing nothing, if one is not out."""
        self.allocator.free(frame_ids)

    def leave(self, pages: Ids, frame_ids: Ids) -> None:
        """These frames, which requests owned, are those of these pages now, none of which had one."""
        self.frames.bind(self.tier, self.group, pages, frame_ids)

    def take_over(self, pages: Ids) -> Ids:
        """The frames of these pages, all resident, become their caller's; the pages have none."""
        frames = self.frames.unbind(self.tier, self.group, pages)
        assert len(frames) == len(pages), "a page without a frame was taken over"
        return frames

    def drop(self, pages: Ids) -> Ids:
        """Take the frames of these pages away, free again at once; returns the pages that had one."""
        had: Ids = pages[self.resident(pages)]
        self.allocator.free(np.sort(self.frames.unbind(self.tier, self.group, had)))
        return had
