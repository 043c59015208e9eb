"""GroupFrames: what is known of the frames of one (tier, group): how many, which are free, which page has which."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from quire.memory.residency import Column
from quire.spec.ids import Bools, Ids


class FrameAllocator(Protocol):
    """Hands out frames of one group."""

    name: str

    @property
    def num_frames(self) -> int:
        """Frames of the group, the padding frame not counted."""

    @property
    def num_free(self) -> int:
        """Frames that could be given out now."""

    def is_out(self, frame_ids: Ids | slice, /) -> Bools:
        """Per frame id: whether it is given out."""


A = TypeVar("A", bound=FrameAllocator)


class GroupFrames(Generic[A]):
    """It owns `allocator`, and is the only writer of frames into `table`.

    A page that has a frame here is resident; whose the page is, is no concern of this class. Page ids are distinct
    within a call.
    """

    def __init__(self, table: Column, allocator: A) -> None:
        self.table = table
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
        """Frames that belong to nobody."""
        return self.allocator.num_free

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
