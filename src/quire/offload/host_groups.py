"""HostGroup: the host frames of one group. The residency table's column for the host says which pages have one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from quire.cache.groups import NO_PAGES
from quire.cache.hold import HeldFrames
from quire.cache.states import GroupCache
from quire.cache.statistics import in_state
from quire.memory.allocator import GroupFrames
from quire.memory.allocator.host import HostTokenToKVPoolAllocator
from quire.memory.residency import Column, State
from quire.memory.runs import in_order
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.rank import Rank

QUARANTINE_SHARE = 64  # quarantined at most one frame in so many; beyond that the oldest is used again


@dataclass(slots=True)
class GroupPages:
    """Pages of one group in a transfer: `at` are their places on the path, `device` and `host` their frames."""

    group: int
    pages: Ids
    at: np.ndarray
    device: Ids
    host: Ids
    ranks: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class HostFrameCounts:
    """Host frames of a group by owner, with the sum `total`; a transfer owns or still reads the `moving` ones."""

    total: int
    free: int = in_state("free", "host")
    cached: int = in_state("cached", "host")
    moving: int = in_state("moving", "host")
    quarantined: int = in_state("quarantined", "host")
    released: int = in_state("released", "host")


class HostGroup(GroupFrames[HostTokenToKVPoolAllocator]):
    """A page's host frame is freed with its page, or earlier if the group is read in part (not `whole`).

    Frames with wrong bytes are `quarantined`, oldest first and at most `max_quarantined`: memory that fails once may
    fail again. `still_read` has frames without a page that a transfer reads, and whether each is quarantined then."""

    def __init__(self, index: int, table: Column, allocator: HostTokenToKVPoolAllocator, record_bytes: int) -> None:
        super().__init__(table, allocator)
        self.name = table.name
        self.index = index
        self.record_bytes = record_bytes
        self.copied_bytes = record_bytes
        """Bytes of a record that cross between device and host."""
        self.whole = not table.reclaims
        self.max_quarantined = max(1, self.num_frames // QUARANTINE_SHARE)
        self.quarantined: deque[int] = deque()
        self.still_read: dict[int, bool] = {}
        self.dropped_frames = 0
        self._reads: Counter[int] = Counter()  # the number of transfers that read each frame

    def counters(self) -> HostFrameCounts:
        """Frames by owner now."""
        cached, quarantined = int(np.count_nonzero(self.table.frame[1:])), len(self.quarantined)
        return HostFrameCounts(
            total=self.num_frames,
            free=self.num_free,
            cached=cached,
            moving=self.num_used - quarantined - cached,
            quarantined=quarantined,
            released=self.num_released,
        )

    @property
    def num_read_ids(self) -> int:
        """Page ids that cannot be allocated again at once, since a transfer reads their records."""
        return 0

    def withheld(self, moving: Ids) -> list[int]:
        """Page ids that are not free and not those of pages, with the frames `moving` of transfers to the host."""
        return []

    def free_ids(self, pages: Ids) -> Ids:
        """Those of the freed pages whose ids can be allocated again now."""
        return pages

    def only_copies(self, pages: Ids) -> Ids:
        """Those of these pages whose host frames are their only copies."""
        return NO_PAGES

    def num_savable(self, wanted: int, room: Callable[[int], int]) -> int:
        """How many of `wanted` pages have room to be saved; `room` makes room for frames and returns their number."""
        return room(wanted)

    def take(self, num_frames: int) -> Ids:
        """Allocate frames for a transfer, until they are bound or released. Raises OutOfPages, changing nothing."""
        size = self.allocator.page_size
        return self.allocator.alloc_page(num_frames)[::size] // np.int32(size)

    def take_for(self, pages: Ids) -> Ids:
        """As `take`, a frame for each of these cached pages."""
        return self.take(len(pages))

    def untake_for(self, frames: Ids) -> None:
        """Free frames of `take_for` that are not bound."""
        self.free_frames(frames)

    def free_frames(self, frames: Ids) -> None:
        self.allocator.free_pages(frames)

    def untake_checked(self, frames: Ids, bad: Bools) -> None:
        """Free allocated frames without a page that no transfer reads; quarantine bad ones."""
        self.free_frames(in_order(frames[~bad]))
        self.quarantined.extend(frames[bad].tolist())
        while len(self.quarantined) > self.max_quarantined:
            self.free_frames(np.array([self.quarantined.popleft()], dtype=np.int32))

    @property
    def reads(self) -> Collection[int]:
        """Frames that transfers read."""
        return self._reads.keys()

    def good(self, pages: Ids) -> Bools:
        """Per page: whether it has a frame that is not known to be damaged."""
        return self.table.present(pages) & ~self.table.has(pages, State.DAMAGED)

    def damage(self, pages: Ids) -> None:
        """Mark the frames of these pages as damaged: the pages are saved again if possible."""
        self.table.mark(pages[self.table.present(pages)], State.DAMAGED)

    def bind(self, pages: Ids, frames: Ids, ranks: np.ndarray | None = None) -> None:
        """Bind these frames to pages without one. Groups that are read in part need `ranks`."""
        fetched = pages[self.table.has(pages, State.FETCHED)]
        self.table.bind(pages, frames)
        self.table.mark(fetched, State.FETCHED)
        for rank in Rank if ranks is not None else ():
            self.table.put(pages[ranks == rank], rank)

    def unpinned(self, pages: Ids) -> Ids:
        """Those of these pages whose host frames no hold pins."""
        return pages[self.table.pins[pages] == 0] if self.table.reclaims else pages

    def drop(self, pages: Ids) -> None:
        """Free the frames of these pages, if any, when no transfer reads them; quarantine damaged ones."""
        pages = pages[self.table.present(pages)]
        if not len(pages):
            return
        bad = self.table.has(pages, State.DAMAGED)
        frames = self.table.unbind(pages)
        if self._reads:
            read = np.array([frame in self._reads for frame in frames.tolist()], dtype=np.bool_)
            self.still_read.update(zip(frames[read].tolist(), bad[read].tolist(), strict=True))
            frames, bad = frames[~read], bad[~read]
        self.untake_checked(frames, bad)

    def evict(self, num_frames: int) -> None:
        """Reclaim up to `num_frames` frames of pages that stay."""
        pages = self.table.reclaim(num_frames)
        self.drop(pages)
        self.dropped_frames += len(pages)

    def begin_reading(self, frames: Ids) -> None:
        """A transfer reads these frames: they are not free until `end_reading`."""
        self._reads.update(frames.tolist())

    def end_reading(self, frames: Ids) -> None:
        """The transfer has ended."""
        for frame in frames.tolist():
            self._reads[frame] -= 1
            if not self._reads[frame]:
                del self._reads[frame]
        free = [frame for frame in frames.tolist() if frame in self.still_read and frame not in self._reads]
        bad = np.array([self.still_read.pop(frame) for frame in free], dtype=np.bool_)
        self.untake_checked(np.array(free, dtype=np.int32), bad)


class PageIdGroup(HostGroup):
    """Host frames that are the ids of their pages (`PageIdFrames`). The table says which pages have a sealed record. A
    page id can be allocated again when its page is freed and no transfer reads the record; `damage` quarantines it."""

    are_page_ids = True

    def __init__(
        self, index: int, table: Column, allocator: HostTokenToKVPoolAllocator, record_bytes: int, num_spare: int
    ) -> None:
        super().__init__(index, table, allocator, record_bytes)
        self.copied_bytes = 0
        self.max_quarantined = max(1, min(self.max_quarantined, num_spare))
        self._bad: set[int] = set()  # pages to quarantine when they are freed

    @property
    def num_read_ids(self) -> int:
        return len(self._reads)

    def withheld(self, moving: Ids) -> list[int]:
        return [*self.quarantined, *self.still_read, *moving.tolist()]

    def only_copies(self, pages: Ids) -> Ids:
        return pages

    def num_savable(self, wanted: int, room: Callable[[int], int]) -> int:
        return wanted  # the frames are there

    def take_for(self, pages: Ids) -> Ids:
        return pages

    def untake_for(self, frames: Ids) -> None:
        """Nothing: the frames belong to cached pages."""

    def damage(self, pages: Ids) -> None:
        super().damage(pages)
        self._bad.update(pages.tolist())

    def drop(self, pages: Ids) -> None:
        """The records of these pages are not sealed any more."""
        self.table.unbind(pages)

    def free_ids(self, pages: Ids) -> Ids:
        if not self._reads and not self._bad:
            return pages
        read, bad = (
            np.array([page in each for page in pages.tolist()], dtype=np.bool_) for each in (self._reads, self._bad)
        )
        self._bad.difference_update(pages[bad].tolist())
        self.still_read.update(zip(pages[read].tolist(), bad[read].tolist(), strict=True))
        bad &= ~read
        self.untake_checked(pages[bad], bad[bad])
        return pages[~read & ~bad]


def needed_frames(groups: Iterable[GroupCache], pages: Ids) -> list[HeldFrames]:
    """Frames, on the device or else on the host, that a request needs in these groups to begin after `pages`."""
    found = []
    for group in groups:
        needed = group.needed_pages(pages)
        here = group.table.present(needed)
        for tier, part in ((Tier.DEVICE, needed[here]), (Tier.HOST, needed[~here])):
            found += [HeldFrames(group.index, tier, part)] if len(part) else []
    return found
