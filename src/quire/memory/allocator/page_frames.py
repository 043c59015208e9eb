"""PageFrames: the frames of one group, given to pages that exist already. Bookkeeping only, on the host."""

from __future__ import annotations

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator
from quire.memory.allocator.group_frames import GroupFrames
from quire.memory.runs import in_order
from quire.spec.ids import Ids


class PageFrames(GroupFrames[BaseTokenToKVPoolAllocator]):
    """Which pages have a frame, and which frames are free: pages of the allocator are the frames."""

    def take(self, pages: Ids) -> None:
        """Give each of these pages a frame; none of them has one. Raises OutOfPages, changing nothing."""
        self.give(pages, self.allocator.alloc_pages(len(pages)))

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

    def hand_over(self, old_pages: Ids, new_pages: Ids) -> None:
        """The frames of `old_pages`, all resident, become those of `new_pages`, none resident, in order.

        No frame is given out or comes back.
        """
        self.table.move(old_pages, new_pages)
