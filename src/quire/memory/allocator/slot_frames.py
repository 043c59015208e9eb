"""SlotFrames: the frames of a group whose frames belong to requests first, and to pages when they are left behind."""

from __future__ import annotations

import numpy as np

from quire.memory.allocator.group_frames import GroupFrames
from quire.memory.allocator.mamba import MambaSlotAllocator
from quire.spec.ids import Ids


class SlotFrames(GroupFrames[MambaSlotAllocator]):
    """Takes frames for requests, and says which page has which of those that were left behind."""

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
