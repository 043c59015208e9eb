"""GroupCache: the frames of one group, and what becomes of them as requests begin, grow, settle and end.

`KVCache` does the same with every group; how groups differ is here, and follows from their reach alone:

    WholeGroup     every page keeps its frame as long as it is cached
    PassingGroup   a request reads a part that moves along; what it has passed may be dropped while its page stays
    CarriedGroup   a request rewrites one frame of its own, and leaves copies of it behind (`quire.cache.carried`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths, Rows
from quire.memory.allocator import PageFrames, SlotFrames
from quire.memory.residency import Column
from quire.prefix.radix_cache import RadixCache
from quire.prefix.reach import Reach
from quire.spec.ids import Ids
from quire.spec.rank import Rank

NO_PAGES: Ids = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Given:
    """What a request gives up in one group, once no launched step touches it any more.

    `unpinned` cached pages it no longer reads are idle with `rank`; of private pages in `dropped` it no longer
    reads the frames; `frames` were its own.
    """

    group: int
    unpinned: Ids = field(default_factory=lambda: NO_PAGES)
    rank: Rank = Rank.PASSED
    dropped: Ids = field(default_factory=lambda: NO_PAGES)
    frames: Ids = field(default_factory=lambda: NO_PAGES)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Work of one step in one carried group: consecutive runs of tokens, those of one request as neighbours, in order.

    Piece i is `lengths[i]` tokens; it starts from what frame `sources[i]` holds (0: from nothing) and leaves the result
    in frame `targets[i]`.
    """

    lengths: Ids
    sources: Ids
    targets: Ids


Launched = tuple[Pieces, list[Given]]
"""The pieces of a step, and what its requests gave up by launching it."""


@dataclass(frozen=True, slots=True)
class RowPages:
    """A request's row as groups see it: `pages` from the first on, the first `protected` of them whole and settled, and
    cached where prefixes are shared."""

    row: int
    pages: Ids
    protected: int


class GroupCache(ABC):
    """One group. `row` is a request's row, `pages` its pages from the first on; pages are cached, private or moving.

    `dropped_frames` counts frames of cached pages that were dropped while their pages stayed, `revived_frames` those
    that such pages got back from requests that had computed them again, `left` frames that requests left for others to
    begin on, where that takes a frame of its own, and `skipped` places where there was none for it.
    """

    def __init__(self, index: int, reach: Reach, frames: PageFrames | SlotFrames) -> None:
        self.index = index
        self.name = frames.name
        self.num_frames = frames.num_frames
        self.reach = reach
        self.dropped_frames = self.revived_frames = self.left = self.skipped = 0

    @property
    def table(self) -> Column:
        """Which pages have which of the group's frames."""
        return self.frames.table

    @property
    @abstractmethod
    def frames(self) -> PageFrames | SlotFrames:
        """The group's frames, and which pages have them."""

    @property
    def num_free(self) -> int:
        """Frames that belong to nobody."""
        return self.frames.num_free

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Frames of cached pages that could be had."""

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """Frames of cached pages."""

    def pinned(self, row: int, pages: Ids) -> Ids:
        """Which of a row's cached `pages` it pins."""
        return NO_PAGES

    def frames_of(self, row: int) -> Ids:
        """Frames that a row owns beside those of its pages, in no order."""
        return NO_PAGES

    def books(self) -> tuple[object, ...]:
        """What it keeps of rows and of cached frames, for whoever compares what is with what was."""
        return ()

    def launch(
        self, kvs: Sequence[RequestKV], rows: Rows, ends: Lengths, table: Ids, *, leaves: bool
    ) -> Launched | None:
        """What the step being launched does with the frames that requests carry, which goes on to `ends[i]` tokens.

        `table` holds all rows of pages; `leaves` says whether frames may be left for others. None where none are
        carried.
        """
        return None

    @abstractmethod
    def would_pin(self, pages: Ids, evictable: int) -> int:
        """Frames that are evictable now and will not be once a request begins behind `pages`, of which that many are
        evictable."""

    @abstractmethod
    def needs(self, num_pages: int, num_cached: int) -> int:
        """The most frames that a request of `num_pages` pages, beginning behind `num_cached` of them, takes at once."""

    @abstractmethod
    def owed(self, rows: Rows, have: Lengths, reached: Lengths) -> int:
        """The most frames that these rows, which have `have[i]` pages, still take until they have `reached[i]`."""

    @abstractmethod
    def reserve(self, num_pages: int) -> int:
        """Frames to keep for running requests that may take `num_pages` new pages between them in the next step."""

    @abstractmethod
    def wanted(self, rows: Rows, num_new: int) -> int:
        """Frames that these rows need to go on, with `num_new` new pages among them."""

    @abstractmethod
    def begin(self, row: int, pages: Ids) -> None:
        """A request begins behind these cached pages."""

    @abstractmethod
    def take(self, rows: Rows, new_pages: Ids) -> None:
        """Take the frames that `wanted` counted. Raises OutOfPages, changing nothing. `grow`, which cannot fail, or
        `untake` follows, with the same pages."""

    @abstractmethod
    def untake(self, new_pages: Ids) -> None:
        """Give back what was taken."""

    def grow(self, rows: Rows, new_pages: Ids) -> None:
        """What was taken is the pages' or rows' it is for."""

    @abstractmethod
    def restore(self, pages: Ids) -> Ids:
        """Give these cached pages, which have no frame, one each; there is room. Returns the frames, whose content is
        on its way."""

    @abstractmethod
    def owes(self, row: int, num_pages: int) -> bool:
        """Whether what others need to begin behind that many pages, which are settled, has still to come."""

    @abstractmethod
    def commit(self, row: RowPages, start: int, ours: Ids, marks: Mapping[int, Rank]) -> list[Given]:
        """Pages from `start` up to `row.protected` are the tree's now; `ours` were the request's own for the first of
        them, which others had cached before. `marks` are the resume points it leaves, in pages."""

    @abstractmethod
    def passed(self, row: RowPages, cached: int) -> list[Given]:
        """As `commit`, where nothing is shared: pages up to `row.protected` are whole and stay private, but for the
        first `cached`, which it began on."""

    @abstractmethod
    def finish(self, row: RowPages) -> list[Given]:
        """The request ends."""

    @abstractmethod
    def give_back(self, given: Given) -> None:
        """What `Given` says."""

    @abstractmethod
    def forget(self, pages: Ids) -> None:
        """These pages leave the cache; their frames are free."""

    @abstractmethod
    def evict(self, num_frames: int) -> int:
        """Drop up to that many frames of cached pages whose pages stay; returns how many."""


class WholeGroup(GroupCache):
    """Every page of a prefix is read by all that follows: a frame goes when its page goes."""

    def __init__(self, index: int, reach: Reach, frames: PageFrames, tree: RadixCache) -> None:
        super().__init__(index, reach, frames)
        self._frames = frames
        self._tree = tree

    @property
    def frames(self) -> PageFrames:
        return self._frames

    @property
    def num_evictable(self) -> int:
        return self._tree.num_evictable

    @property
    def num_cached(self) -> int:
        return self._tree.num_pages

    def would_pin(self, pages: Ids, evictable: int) -> int:
        return evictable

    def needs(self, num_pages: int, num_cached: int) -> int:
        return num_pages - num_cached

    def owed(self, rows: Rows, have: Lengths, reached: Lengths) -> int:
        return int((reached - have).sum())

    def reserve(self, num_pages: int) -> int:
        return num_pages

    def wanted(self, rows: Rows, num_new: int) -> int:
        return num_new

    def begin(self, row: int, pages: Ids) -> None:
        pass

    def take(self, rows: Rows, new_pages: Ids) -> None:
        self.frames.take(new_pages)

    def untake(self, new_pages: Ids) -> None:
        self.frames.drop(new_pages)

    def restore(self, pages: Ids) -> Ids:
        return self.frames.take(pages)

    def owes(self, row: int, num_pages: int) -> bool:
        return False

    def commit(self, row: RowPages, start: int, ours: Ids, marks: Mapping[int, Rank]) -> list[Given]:
        self._revive(ours, row.pages[start : start + len(ours)])
        return []

    def passed(self, row: RowPages, cached: int) -> list[Given]:
        return []

    def finish(self, row: RowPages) -> list[Given]:
        return []

    def give_back(self, given: Given) -> None:
        raise AssertionError("nothing is given up in a group that is read as a whole")

    def forget(self, pages: Ids) -> None:
        self.frames.drop(pages)

    def evict(self, num_frames: int) -> int:
        return 0

    def _revive(self, ours: Ids, theirs: Ids) -> None:
        """Cached pages without a frame take over those of the request's pages that hold the same."""
        if len(ours):
            missing = ~self.frames.resident(theirs)
            self.frames.hand_over(ours[missing], theirs[missing])
            self.revived_frames += int(np.count_nonzero(missing))


class PassingGroup(WholeGroup):
    """A request reads its last pages only. Cached frames it reads are pinned; what it passes is idle.

    |-- passed: may be dropped --|-- read: pinned --|-- read: private --|
    0                            first[row]         protected           allocated
    """

    def __init__(self, index: int, reach: Reach, frames: PageFrames, tree: RadixCache, max_requests: int) -> None:
        super().__init__(index, reach, frames, tree)
        assert frames.table.idle is not None
        self._idle = frames.table.idle
        self.first = np.zeros(max_requests, dtype=np.int64)  # page of each row that is the first still read

    @property
    def num_evictable(self) -> int:
        return self._idle.num_idle

    @property
    def num_cached(self) -> int:
        return self._idle.num_pages

    def would_pin(self, pages: Ids, evictable: int) -> int:
        return self._idle.count_idle(pages[_slice(self.reach.needed(len(pages)))])

    def needs(self, num_pages: int, num_cached: int) -> int:
        read = len(self.reach.needed(num_cached))  # it holds these from the start
        return min(num_pages - num_cached, max(1, self.reach.held(num_pages) - read))

    def owed(self, rows: Rows, have: Lengths, reached: Lengths) -> int:
        most = np.fromiter(map(self.reach.held, reached.tolist()), dtype=np.int64, count=len(rows))
        return int(np.clip(most - (have - self.first[rows]), 0, np.maximum(0, reached - have)).sum())

    def begin(self, row: int, pages: Ids) -> None:
        needed = self.reach.needed(len(pages))
        self.first[row] = needed.start
        self.table.pin(pages[_slice(needed)], Rank.USED)

    def commit(self, row: RowPages, start: int, ours: Ids, marks: Mapping[int, Rank]) -> list[Given]:
        self._revive(ours, row.pages[start : start + len(ours)])
        self.table.pin(row.pages[start : row.protected])
        first, after = self._advance(row)
        if first == after:
            return []
        passed = row.pages[first:after]
        ranks = np.zeros(len(passed), dtype=np.int8)
        for num_pages, rank in marks.items():
            kept = self.reach.needed(num_pages)
            part = ranks[max(0, kept.start - first) : max(0, kept.stop - first)]
            np.maximum(part, rank, out=part)
        return [
            Given(self.index, passed[ranks == rank].copy(), rank) for rank in Rank if np.count_nonzero(ranks == rank)
        ]

    def passed(self, row: RowPages, cached: int) -> list[Given]:
        first, after = self._advance(row)
        ours = max(first, min(after, cached))
        unpinned, dropped = row.pages[first:ours].copy(), row.pages[ours:after].copy()
        return [Given(self.index, unpinned, dropped=dropped)] if after > first else []

    def finish(self, row: RowPages) -> list[Given]:
        read = row.pages[self.first[row.row] : row.protected]
        return [Given(self.index, read.copy(), Rank.USED)] if len(read) else []

    def give_back(self, given: Given) -> None:
        self.table.unpin(given.unpinned, given.rank)
        self.frames.vacate(given.dropped)

    def evict(self, num_frames: int) -> int:
        pages = self.table.reclaim(num_frames)
        self.frames.vacate(pages)
        self.dropped_frames += len(pages)
        return len(pages)

    def pinned(self, row: int, pages: Ids) -> Ids:
        return pages[int(self.first[row]) :]

    def books(self) -> tuple[object, ...]:
        return (self.first.tobytes(),)

    def _advance(self, row: RowPages) -> tuple[int, int]:
        """Move the first page still read to where a request with `row.protected` whole pages needs it; old and new."""
        first = int(self.first[row.row])
        after = max(first, self.reach.needed(row.protected).start)
        self.first[row.row] = after
        return first, after


def _slice(pages: range) -> slice:
    return slice(pages.start, pages.stop)
