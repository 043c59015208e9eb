"""PageFrames: the frames of one group, given to pages that exist already. Bookkeeping only, on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator
from quire.memory.allocator.group_frames import GroupFrames
from quire.memory.runs import in_order
from quire.spec.ids import Ids


class PageFrames(GroupFrames[BaseTokenToKVPoolAllocator]):
    """Which pages have a frame, and which frames are free: pages of the allocator are the frames."""

    def translate(self, slots: npt.ArrayLike) -> Ids:
        """Token slots of pages -> those of their frames, int32, same shape.

        -1 (no slot) maps to -1, and a slot of a page without a frame to its place on the padding page.
        """
        found = np.asarray(slots)
        if found.dtype != np.int32:
            found = found.astype(np.int32)
        size = np.int32(self.allocator.page_size)
        assert found.min(initial=-1) >= -1 and found.max(initial=-1) < (self.table.num_pages + 1) * int(size)
        # Floor division takes -1 to page -1, the last entry, which maps to itself.
        pages = found // size
        translated: Ids = found + (self.table.mapping[pages] - pages) * size
        return translated

    def take(self, pages: Ids) -> Ids:
        """Give each of these pages a frame, and return them; none has one. Raises OutOfPages, changing nothing."""
        frames = self.allocator.alloc_pages(len(pages))
        self.give(pages, frames)
        return frames

    def give(self, pages: Ids, frame_ids: Ids) -> None:
        """These frames, handed out and no page's, are those of these pages now, none of which had one."""
        self.table.bind(pages, frame_ids)

    def untake(self, frame_ids: Ids) -> None:
        """Give back frames that are handed out and no page's."""
        self.allocator.free_pages(frame_ids)

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
