"""HostGroup: the host frames of one group. Which pages have one is the frame table's column for the host."""

from __future__ import annotations

from collections import deque

import numpy as np

from quire.cache.groups import NO_PAGES
from quire.memory.allocator import PageFrames
from quire.prefix.shelf import Rank, Shelf
from quire.spec.ids import Bools, Ids

QUARANTINE_SHARE = 64
"""One frame in so many may be kept out of use because what it held was wrong; beyond that the oldest comes back."""


class HostGroup:
    """A page's host frame goes with its page, or, where the group is read in part, before it (`shelf`).

    Frames whose bytes were wrong are set aside: memory that fails once may fail again.
    """

    def __init__(self, index: int, frames: PageFrames, *, whole: bool) -> None:
        self.index = index
        self.frames = frames
        self.shelf = None if whole else Shelf(len(frames.column) - 1)
        self._quarantined: deque[int] = deque()
        self._busy = np.zeros(frames.num_frames + 1, dtype=np.int32)  # moves that read a frame, whoever has it
        self._left: set[int] = set()  # frames that are nobody's, and read still
        self.dropped_frames = 0

    @property
    def name(self) -> str:
        """The group's name."""
        return self.frames.name

    @property
    def num_frames(self) -> int:
        """Frames on the host, the unused first one not counted."""
        return self.frames.num_frames

    @property
    def num_free(self) -> int:
        """Frames that belong to nobody."""
        return self.frames.num_free

    @property
    def num_quarantined(self) -> int:
        """Frames set aside."""
        return len(self._quarantined)

    @property
    def quarantined(self) -> list[int]:
        """The frames set aside, oldest first."""
        return list(self._quarantined)

    def statistics(self) -> dict[str, int]:
        """Frames by owner, which sum to `total`; `moving` ones are a move's, or were given up while one reads them."""
        cached = int(np.count_nonzero(self.column[1:]))
        moving = self.num_frames - self.num_free - self.num_quarantined - cached
        counts = {"free": self.num_free, "cached": cached, "moving": moving, "quarantined": self.num_quarantined}
        return {"total": self.num_frames, **counts}

    @property
    def column(self) -> Ids:
        """Host frame of each page, 0 where it has none."""
        return self.frames.column

    def resident(self, pages: Ids) -> Bools:
        """Per page: whether it has a host frame."""
        return self.frames.resident(pages)

    def take(self, num_frames: int) -> Ids:
        """Frames, which belong to a move until they are bound or given back. Raises OutOfPages, changing nothing."""
        return self.frames.allocator.alloc_pages(num_frames)

    def untake(self, frames: Ids) -> None:
        """Give back frames that `take` gave."""
        self.frames.untake(frames)

    def bind(self, pages: Ids, frames: Ids, ranks: np.ndarray | None = None) -> None:
        """These pages, none of which had one, have these frames. `ranks` say what they are good for, where frames go
        before their pages."""
        self.frames.give(pages, frames)
        if self.shelf is not None:
            for rank in Rank:
                part = pages if ranks is None else pages[ranks == rank]
                if len(part) and (ranks is not None or rank is Rank.USED):
                    self.shelf.put(part, rank)

    def drop(self, pages: Ids) -> None:
        """Free the frames of these pages, or once no move reads them any more; pages without one are passed over."""
        if self.shelf is not None:
            self.shelf.remove(pages)
        self._give_back(pages)

    def _give_back(self, pages: Ids) -> None:
        if self._busy[self.column[pages]].any():
            frames = self.column[pages]
            busy = self._busy[frames] > 0
            self._left.update(frames[busy].tolist())
            self.frames.frames.unbind(self.frames.tier, self.index, pages[busy])
            pages = pages[~busy]
        self.frames.drop(pages)

    def begin_reading(self, frames: Ids) -> None:
        """A move reads these frames; they are not used for anything else until `end_reading`."""
        self._busy[frames] += 1

    def end_reading(self, frames: Ids) -> None:
        """It does no more."""
        self._busy[frames] -= 1
        free = [frame for frame in frames.tolist() if frame in self._left and not self._busy[frame]]
        if free:
            self._left.difference_update(free)
            self.untake(np.array(sorted(free), dtype=np.int32))

    @property
    def left(self) -> list[int]:
        """Frames that are nobody's and read still."""
        return sorted(self._left)

    def evict(self, num_frames: int) -> int:
        """Free up to that many frames of pages that stay; returns how many."""
        if self.shelf is None:
            return 0
        pages = self.shelf.evict(num_frames)
        self._give_back(pages)
        self.dropped_frames += len(pages)
        return len(pages)

    def pin(self, pages: Ids) -> None:
        """A move reads the frames of these pages."""
        if self.shelf is not None:
            self.shelf.pin(pages)

    def unpin(self, pages: Ids) -> None:
        """It does no more."""
        if self.shelf is not None and len(pages):
            self.shelf.unpin(pages, Rank.PASSED)

    def quarantine(self, frames: Ids) -> None:
        """Set frames aside that a move has, or that were taken from their pages (`take_away`)."""
        self._quarantined.extend(frames.tolist())
        while len(self._quarantined) > max(1, self.num_frames // QUARANTINE_SHARE):
            frame = self._quarantined.popleft()
            if self._busy[frame]:
                self._left.add(frame)
            else:
                self.untake(np.array([frame], dtype=np.int32))

    def take_away(self, pages: Ids) -> Ids:
        """The frames of these pages, which have none any more, are the caller's."""
        pages = pages[self.resident(pages)]
        if not len(pages):
            return NO_PAGES
        if self.shelf is not None:
            self.shelf.remove(pages)
        return self.frames.frames.unbind(self.frames.tier, self.index, pages)
