"""HostGroup: the host frames of one group. Which pages have one is the residency table's column for the host."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from quire.memory.allocator import GroupFrames
from quire.memory.host_pool import HostTokenToKVPoolAllocator
from quire.memory.residency import Column, State
from quire.memory.runs import in_order
from quire.spec.ids import Bools, Ids
from quire.spec.rank import Rank

QUARANTINE_SHARE = 64
"""One frame in so many may be kept out of use because what it held was wrong; beyond that the oldest comes back."""


class HostGroup(GroupFrames[HostTokenToKVPoolAllocator]):
    """A page's host frame goes with its page, or, where the group is read in part (not `whole`), before it.

    Frames whose bytes were wrong are `quarantined`, oldest first: memory that fails once may fail again. Frames of no
    page that a transfer still reads are in `still_read`, each with whether it is to be quarantined after that.
    """

    def __init__(self, index: int, table: Column, allocator: HostTokenToKVPoolAllocator) -> None:
        super().__init__(table, allocator)
        self.index = index
        self.whole = not table.reclaims
        self.quarantined: deque[int] = deque()
        self.still_read: dict[int, bool] = {}
        self.dropped_frames = 0
        self._reads: Counter[int] = Counter()  # transfers that read a frame, whichever page has it

    def statistics(self) -> dict[str, int]:
        """Frames by owner, which sum to `total`; `moving` ones are a move's, or were given up while one reads them."""
        cached, quarantined = int(np.count_nonzero(self.column[1:])), len(self.quarantined)
        moving = self.num_frames - self.num_free - quarantined - cached
        counts = {"free": self.num_free, "cached": cached, "moving": moving, "quarantined": quarantined}
        return {"total": self.num_frames, **counts}

    # -- frames of no page

    def take(self, num_frames: int) -> Ids:
        """Frames, which belong to a move until they are bound or given back. Raises OutOfPages, changing nothing."""
        size = self.allocator.page_size
        return self.allocator.alloc_page(num_frames)[::size] // np.int32(size)

    def untake(self, frames: Ids) -> None:
        """Give back frames that are handed out and no page's."""
        self.allocator.free_pages(frames)

    def quarantine(self, frames: Ids) -> None:
        """Set aside frames that are handed out, no page's, and read by no transfer."""
        self.quarantined.extend(frames.tolist())
        while len(self.quarantined) > max(1, self.num_frames // QUARANTINE_SHARE):
            self.untake(np.array([self.quarantined.popleft()], dtype=np.int32))

    # -- frames of pages

    def bind(self, pages: Ids, frames: Ids, ranks: np.ndarray | None = None) -> None:
        """These pages, none of which had one, have these frames. `ranks` say what they are good for, where frames go
        before their pages."""
        fetched = pages[self.table.has(pages, State.FETCHED)]
        self.table.bind(pages, frames)
        self.table.mark(fetched, State.FETCHED)
        for rank in Rank if ranks is not None else ():
            self.table.put(pages[ranks == rank], rank)

    def drop(self, pages: Ids) -> None:
        """Free the frames of these pages, or once no transfer reads them any more; damaged ones are quarantined. Pages
        without one are passed over."""
        damaged = self.table.has(pages, State.DAMAGED)
        if damaged.any():
            self._release(self.table.unbind(pages[damaged]), aside=True)
            pages = pages[~damaged]
        self._release(self.table.unbind(pages), aside=False)

    def evict(self, num_frames: int) -> int:
        """Free up to that many frames of pages that stay; returns how many."""
        pages = self.table.reclaim(num_frames)
        self.drop(pages)
        self.dropped_frames += len(pages)
        return len(pages)

    def unpinned(self, pages: Ids) -> Ids:
        """Those of these pages whose frames no hold keeps here."""
        return pages[self.table.pins[pages] == 0] if self.table.reclaims else pages

    # -- what they hold

    def good(self, pages: Ids) -> Bools:
        """Per page: whether it has a frame that, as far as is known, holds what it should."""
        return self.resident(pages) & ~self.table.has(pages, State.DAMAGED)

    def damage(self, pages: Ids) -> None:
        """What the frames of these pages hold is wrong: they are not used again soon, and saved anew if they can be."""
        self.table.mark(pages[self.resident(pages)], State.DAMAGED)

    def drop_damaged(self, pages: Ids) -> None:
        """Pages whose frames hold something else have none any more: the caller has others for them."""
        self.drop(self.unpinned(pages[self.table.has(pages, State.DAMAGED)]))

    def begin_reading(self, frames: Ids) -> None:
        """A transfer reads these frames; they are not used for anything else until `end_reading`."""
        self._reads.update(frames.tolist())

    def end_reading(self, frames: Ids) -> None:
        """It does no more."""
        self._reads.subtract(frames.tolist())
        self._reads = +self._reads
        free = [frame for frame in frames.tolist() if frame in self.still_read and frame not in self._reads]
        aside = np.array([self.still_read.pop(frame) for frame in free], dtype=np.bool_)
        idle = np.array(free, dtype=np.int32)
        self._release(idle[~aside], aside=False)
        self._release(idle[aside], aside=True)

    def _release(self, frames: Ids, *, aside: bool) -> None:
        """Frames of no page are free, or set `aside`, once no transfer reads them."""
        if self._reads:
            read = np.isin(frames, list(self._reads))
            self.still_read.update(dict.fromkeys(frames[read].tolist(), aside))
            frames = frames[~read]
        if aside:
            self.quarantine(frames)
        else:
            self.untake(in_order(frames))
