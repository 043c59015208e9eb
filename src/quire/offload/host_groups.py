"""HostGroup: the host frames of one group. Which pages have one is the frame table's column for the host."""

from __future__ import annotations

from collections import deque

import numpy as np

from quire.memory.allocator import PageFrames
from quire.memory.host_pool import HostTokenToKVPoolAllocator
from quire.memory.residency import Column
from quire.spec.ids import Bools, Ids
from quire.spec.rank import Rank

QUARANTINE_SHARE = 64
"""One frame in so many may be kept out of use because what it held was wrong; beyond that the oldest comes back."""


class HostGroup:
    """A page's host frame goes with its page, or, where the group is read in part, before it.

    Frames whose bytes were wrong are set aside: memory that fails once may fail again.
    """

    def __init__(self, index: int, table: Column, slots: HostTokenToKVPoolAllocator) -> None:
        self.index = index
        self.frames = frames = PageFrames(table, slots)
        self._slots = slots
        self.whole = frames.table.idle is None
        self._quarantined: deque[int] = deque()
        self._busy = np.zeros(frames.num_frames + 1, dtype=np.int32)  # moves that read a frame, whoever has it
        self._left: set[int] = set()  # frames that are nobody's, and read still
        self._distrusted = np.zeros(frames.num_frames + 1, dtype=np.bool_)  # to be set aside when they come back
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
    def table(self) -> Column:
        """Which pages have which of the host's frames."""
        return self.frames.table

    @property
    def column(self) -> Ids:
        """Host frame of each page, 0 where it has none."""
        return self.frames.column

    def resident(self, pages: Ids) -> Bools:
        """Per page: whether it has a host frame."""
        return self.frames.resident(pages)

    def take(self, num_frames: int) -> Ids:
        """Frames, which belong to a move until they are bound or given back. Raises OutOfPages, changing nothing."""
        size = self._slots.page_size
        return self._slots.alloc_page(num_frames)[::size] // np.int32(size)

    def untake(self, frames: Ids) -> None:
        """Give back frames that `take` gave."""
        self.frames.untake(frames)

    def bind(self, pages: Ids, frames: Ids, ranks: np.ndarray | None = None) -> None:
        """These pages, none of which had one, have these frames. `ranks` say what they are good for, where frames go
        before their pages."""
        self.frames.give(pages, frames)
        for rank in Rank if ranks is not None else ():
            self.table.put(pages[ranks == rank], rank)

    def drop(self, pages: Ids) -> None:
        """Free the frames of these pages, or once no move reads them any more; pages without one are passed over."""
        self._give_back(pages)

    def _give_back(self, pages: Ids) -> None:
        frames = self.column[pages]
        held = (self._busy[frames] > 0) | self._distrusted[frames]
        if held.any():
            self._release(self.table.unbind(pages[held]))
            pages = pages[~held]
        self.frames.drop(pages)

    def _release(self, frames: Ids) -> None:
        """Frames that are nobody's are free, once nobody reads them, or set aside."""
        busy = self._busy[frames] > 0
        self._left.update(frames[busy].tolist())
        aside = ~busy & self._distrusted[frames]
        self._distrusted[frames[aside]] = False
        self.quarantine(frames[aside])
        self.untake(np.sort(frames[~busy & ~aside]))

    def distrust(self, pages: Ids) -> None:
        """What the frames of these pages hold is wrong: they are not used again soon, and saved anew if they can be."""
        frames = self.column[pages]
        self._distrusted[frames[frames > 0]] = True

    def is_distrusted(self, pages: Ids) -> Bools:
        """Per page: whether its frame holds something else than it should."""
        distrusted: Bools = self._distrusted[self.column[pages]]
        return distrusted

    def let_go(self, pages: Ids) -> None:
        """Pages whose frames hold something else have none any more: the caller has others for them."""
        self._give_back(self.unpinned(pages[self.is_distrusted(pages)]))

    def unpinned(self, pages: Ids) -> Ids:
        """Those of these pages whose frames no hold keeps here."""
        return pages if self.table.idle is None else pages[self.table.idle.pins[pages] == 0]

    def begin_reading(self, frames: Ids) -> None:
        """A move reads these frames; they are not used for anything else until `end_reading`."""
        self._busy[frames] += 1

    def end_reading(self, frames: Ids) -> None:
        """It does no more."""
        self._busy[frames] -= 1
        free = [frame for frame in frames.tolist() if frame in self._left and not self._busy[frame]]
        if free:
            self._left.difference_update(free)
            self._release(np.array(free, dtype=np.int32))

    @property
    def left(self) -> list[int]:
        """Frames that are nobody's and read still."""
        return sorted(self._left)

    def evict(self, num_frames: int) -> int:
        """Free up to that many frames of pages that stay; returns how many."""
        pages = self.table.reclaim(num_frames)
        self._give_back(pages)
        self.dropped_frames += len(pages)
        return len(pages)

    def pin(self, pages: Ids) -> None:
        """A move reads the frames of these pages."""
        self.table.pin(pages)

    def unpin(self, pages: Ids) -> None:
        """It does no more."""
        self.table.unpin(pages)

    def quarantine(self, frames: Ids) -> None:
        """Set aside frames that are nobody's and that nobody reads."""
        self._quarantined.extend(frames.tolist())
        while len(self._quarantined) > max(1, self.num_frames // QUARANTINE_SHARE):
            self.untake(np.array([self._quarantined.popleft()], dtype=np.int32))
