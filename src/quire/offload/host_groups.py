"""HostGroup: the host frames of one group. Which pages have one is the residency table's column for the host."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from quire.memory.allocator import PageFrames
from quire.memory.host_pool import HostTokenToKVPoolAllocator
from quire.memory.residency import Column, State
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
        self._reads: Counter[int] = Counter()  # transfers that read a frame, whichever page has it
        self._left: dict[int, bool] = {}  # frames of no page that are read still; whether they are to be set aside
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
        fetched = pages[self.table.has(pages, State.FETCHED)]
        self.frames.give(pages, frames)
        self.table.mark(fetched, State.FETCHED)
        for rank in Rank if ranks is not None else ():
            self.table.put(pages[ranks == rank], rank)

    def drop(self, pages: Ids) -> None:
        """Free the frames of these pages, or once no move reads them any more; pages without one are passed over."""
        self._give_back(pages)

    def _give_back(self, pages: Ids) -> None:
        damaged = self.is_damaged(pages)
        if damaged.any():
            self._release(self.table.unbind(pages[damaged]), aside=True)
            pages = pages[~damaged]
        if self._reads:
            read = np.array([frame in self._reads for frame in self.column[pages].tolist()], dtype=np.bool_)
            self._release(self.table.unbind(pages[read]), aside=False)
            pages = pages[~read]
        self.frames.drop(pages)

    def _release(self, frames: Ids, *, aside: bool) -> None:
        """Frames of no page are free once no transfer reads them, or set `aside`."""
        read = [frame for frame in frames.tolist() if frame in self._reads]
        self._left.update(dict.fromkeys(read, aside))
        idle = frames if not read else frames[~np.isin(frames, read)]
        if aside:
            self.quarantine(idle)
        else:
            self.untake(np.sort(idle))

    def damage(self, pages: Ids) -> None:
        """What the frames of these pages hold is wrong: they are not used again soon, and saved anew if they can be."""
        self.table.mark(pages[self.resident(pages)], State.DAMAGED)

    def is_damaged(self, pages: Ids) -> Bools:
        """Per page: whether its frame holds something else than it should."""
        return self.table.has(pages, State.DAMAGED) & self.resident(pages)

    def drop_damaged(self, pages: Ids) -> None:
        """Pages whose frames hold something else have none any more: the caller has others for them."""
        self._give_back(self.unpinned(pages[self.is_damaged(pages)]))

    def unpinned(self, pages: Ids) -> Ids:
        """Those of these pages whose frames no hold keeps here."""
        return pages if self.table.idle is None else pages[self.table.idle.pins[pages] == 0]

    def begin_reading(self, frames: Ids) -> None:
        """A move reads these frames; they are not used for anything else until `end_reading`."""
        self._reads.update(frames.tolist())

    def end_reading(self, frames: Ids) -> None:
        """It does no more."""
        for frame in frames.tolist():
            self._reads[frame] -= 1
            if not self._reads[frame]:
                del self._reads[frame]
        for aside in (False, True):
            free = [frame for frame in frames.tolist() if frame not in self._reads and self._left.get(frame) is aside]
            for frame in free:
                del self._left[frame]
            self._release(np.array(free, dtype=np.int32), aside=aside)

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
