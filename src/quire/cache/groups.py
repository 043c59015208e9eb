"""GroupCache: the frames of one group, and what becomes of them as requests begin, grow, settle and end.

`KVCache` does the same with every group; how groups differ is here, and follows from their reach alone:

    WholeGroup     every page keeps its frame as long as it is cached
    PassingGroup   a request reads a part that moves along; what it has passed may be dropped while its page stays
    CarriedGroup   a request rewrites one frame of its own, and leaves copies of it behind (`quire.cache.carried`)
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths, Rows
from quire.memory.allocator import PageFrames, SlotFrames
from quire.memory.residency import Column
from quire.prefix.radix_cache import RadixCache
from quire.prefix.reach import Reach
from quire.spec.ids import Bools, Ids
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


@dataclass(frozen=True, slots=True)
class NewPages:
    """Whole pages of some requests that have settled: of `kvs[i]`, whose row is `rows[i]`, those from `starts[i]` up to
    `ends[i]`. `table` holds the pages of all rows, int32 `[rows, width]`."""

    kvs: Sequence[RequestKV]
    rows: Rows
    starts: Lengths
    ends: Lengths
    table: Ids

    def pages(self) -> Ids:
        """All of them, one request's behind the other's."""
        return pages_between(self.table, self.rows, self.starts, self.ends)[0]


class GroupCache(ABC):
    """One group. `row` is a request's row, `pages` its pages from the first on; pages are cached, private or moving.

    `dropped_frames` counts frames of cached pages that were dropped while their pages stayed, `revived_frames` those
    that such pages got back from requests that had computed them again, `left` frames that requests left for others to
    begin on, where that takes a frame of its own, and `skipped` places where there was none for it.
    """

    frames: PageFrames | SlotFrames
    """The group's frames, and which pages have them."""

    def __init__(self, index: int, reach: Reach, frames: PageFrames | SlotFrames, tree: RadixCache) -> None:
        self.index = index
        self.name = frames.name
        self.num_frames = frames.num_frames
        self.reach = reach
        self.frames = frames
        self.table: Column = frames.table
        self.dropped_frames = self.revived_frames = self.left = self.skipped = 0
        self._tree = tree

    @property
    def num_free(self) -> int:
        """Frames that belong to nobody."""
        return self.frames.num_free

    @property
    def num_evictable(self) -> int:
        """Frames of cached pages that could be had."""
        return self.table.num_idle if self.table.reclaims else self._tree.num_evictable

    @property
    def num_cached(self) -> int:
        """Frames of cached pages."""
        table = self.table
        return table.num_idle + table.num_pinned if table.reclaims else self._tree.num_pages

    # -- what requests will take

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
    def wanted(self, rows: Rows, num_new: int) -> int:
        """Frames that these rows need to go on, with `num_new` new pages among them."""

    def reserve(self, num_pages: int) -> int:
        """Frames to keep for running requests that may take `num_pages` new pages between them in the next step."""
        return num_pages

    # -- the life of a request

    def begin(self, row: int, pages: Ids) -> None:  # noqa: B027 - only what is read in part is pinned
        """A request begins behind these cached pages."""

    @abstractmethod
    def take(self, rows: Rows, new_pages: Ids) -> None:
        """Take the frames that `wanted` counted. Raises OutOfPages, changing nothing. `grow`, which cannot fail, or
        `untake` follows, with the same pages."""

    @abstractmethod
    def untake(self, new_pages: Ids) -> None:
        """Give back what was taken."""

    def grow(self, rows: Rows, new_pages: Ids) -> None:  # noqa: B027 - frames of pages are theirs when taken
        """What was taken is the pages' or rows' it is for."""

    def launch(
        self, kvs: Sequence[RequestKV], rows: Rows, ends: Lengths, draws: Lengths | None, table: Ids, *, leaves: bool
    ) -> Launched | None:
        """What the step being launched does with the frames that requests carry, which goes on to `ends[i]` tokens.

        It draws `draws[i]` tokens, one at most if that is not given: all but the first of them behind drafts, its last
        tokens. `table` holds all rows of pages; `leaves` says whether frames may be left for others. None where none
        are carried.
        """
        return None

    def settle(self, row: int, num_tokens: int) -> None:  # noqa: B027 - only frames that are carried hear of it
        """So many tokens of a request have settled, of which drafts may have been launched."""

    def owes(self, row: int, num_pages: int) -> bool:
        """Whether what others need to begin behind that many pages, which are settled, has still to come."""
        return False

    def frees(self, rows: Rows, num_pages: Lengths) -> Bools:
        """Which of these rows, of which so many whole pages have settled, would set frames free by a commit."""
        return np.zeros(len(rows), dtype=np.bool_)

    @abstractmethod
    def commit(self, new: NewPages, ours: Ids, theirs: Ids) -> list[Given]:
        """These pages are the tree's now; `ours` were the requests' own for those of them that others had cached
        before, which are `theirs`."""

    def passed(self, new: NewPages) -> list[Given]:
        """As `commit`, where nothing is shared: all pages stay private, but for those that a request began on."""
        return []

    def finish(self, row: RowPages) -> list[Given]:
        """The request ends."""
        return []

    def give_back(self, given: Given) -> None:
        """What `Given` says."""
        raise AssertionError("nothing is given up in a group that is read as a whole")

    # -- cached pages

    @abstractmethod
    def restore(self, pages: Ids) -> Ids:
        """Give these cached pages, which have no frame, one each; there is room. Returns the frames, whose content is
        on its way."""

    def forget(self, pages: Ids) -> None:
        """These pages leave the cache; their frames are free."""
        self.frames.drop(pages)

    def evict(self, num_frames: int) -> int:
        """Drop up to that many frames of cached pages whose pages stay; returns how many."""
        return 0

    # -- for audits

    def pinned(self, row: int, pages: Ids) -> Ids:
        """Which of a row's cached `pages` it pins."""
        return NO_PAGES

    def frames_of(self, row: int) -> Ids:
        """Frames that a row owns beside those of its pages, in no order."""
        return NO_PAGES

    def books(self) -> tuple[object, ...]:
        """What it keeps of rows and of cached frames, for whoever compares what is with what was."""
        return ()


class WholeGroup(GroupCache):
    """Every page of a prefix is read by all that follows: a frame goes when its page goes."""

    frames: PageFrames

    def would_pin(self, pages: Ids, evictable: int) -> int:
        return evictable

    def needs(self, num_pages: int, num_cached: int) -> int:
        return num_pages - num_cached

    def owed(self, rows: Rows, have: Lengths, reached: Lengths) -> int:
        return int((reached - have).sum())

    def wanted(self, rows: Rows, num_new: int) -> int:
        return num_new

    def take(self, rows: Rows, new_pages: Ids) -> None:
        self.frames.take(new_pages)

    def untake(self, new_pages: Ids) -> None:
        self.frames.drop(new_pages)

    def commit(self, new: NewPages, ours: Ids, theirs: Ids) -> list[Given]:
        self._revive(ours, theirs)
        return []

    def restore(self, pages: Ids) -> Ids:
        return self.frames.take(pages)

    def _revive(self, ours: Ids, theirs: Ids) -> None:
        """Cached pages without a frame take over those of the request's pages that hold the same."""
        if len(ours):
            missing = ~self.table.present(theirs)
            self.frames.hand_over(ours[missing], theirs[missing])
            self.revived_frames += int(np.count_nonzero(missing))


class PassingGroup(WholeGroup):
    """A request reads its last pages only. Cached frames it reads are pinned; what it passes is idle.

    |-- passed: may be dropped --|-- read: pinned --|-- read: private --|
    0                            first[row]         protected           allocated
    """

    def __init__(self, index: int, reach: Reach, frames: PageFrames, tree: RadixCache, max_requests: int) -> None:
        super().__init__(index, reach, frames, tree)
        self._held = reach.held(sys.maxsize)
        self.first = np.zeros(max_requests, dtype=np.int64)  # page of each row that is the first still read

    def would_pin(self, pages: Ids, evictable: int) -> int:
        return self.table.num_idle_of(pages[self.reach.first(len(pages)) :])

    def needs(self, num_pages: int, num_cached: int) -> int:
        read = num_cached - self.reach.first(num_cached)  # it holds these from the start
        return min(num_pages - num_cached, max(1, self.reach.held(num_pages) - read))

    def owed(self, rows: Rows, have: Lengths, reached: Lengths) -> int:
        most = np.minimum(reached, self._held)
        return int(np.clip(most - (have - self.first[rows]), 0, np.maximum(0, reached - have)).sum())

    def begin(self, row: int, pages: Ids) -> None:
        first = self.first[row] = self.reach.first(len(pages))
        self.table.pin(pages[first:], Rank.USED)

    def frees(self, rows: Rows, num_pages: Lengths) -> Bools:
        passes: Bools = self.reach.first(num_pages) > self.first[rows]
        return passes

    def commit(self, new: NewPages, ours: Ids, theirs: Ids) -> list[Given]:
        self._revive(ours, theirs)
        pages = new.pages()
        for part in _distinct(pages) if len(ours) else (pages,):
            self.table.pin(part)
        firsts, passed, _ = self._advance(new)
        if not len(passed):
            return []
        ranks = self._ranks(new.kvs, firsts, self.first[new.rows])
        if ranks is None:
            return [Given(self.index, part) for part in _distinct(passed)]
        by_rank = [(rank, passed[ranks == value]) for value, rank in enumerate(Rank)]
        return [Given(self.index, part, rank) for rank, some in by_rank for part in _distinct(some)]

    def passed(self, new: NewPages) -> list[Given]:
        firsts, passed, owners = self._advance(new)
        if not len(passed):
            return []
        cached = np.array([kv.lease.num_pages for kv in new.kvs])
        places = firsts[owners] + np.arange(len(passed)) - owners.searchsorted(owners)
        shared = places < cached[owners]
        given = [Given(self.index, part) for part in _distinct(passed[shared])]
        return [*given, Given(self.index, dropped=passed[~shared])]

    def finish(self, row: RowPages) -> list[Given]:
        read = row.pages[self.first[row.row] : row.protected]
        return [Given(self.index, read.copy(), Rank.USED)] if len(read) else []

    def give_back(self, given: Given) -> None:
        if len(given.unpinned):
            self.table.unpin(given.unpinned, given.rank)
        if len(given.dropped):
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

    def _advance(self, new: NewPages) -> tuple[Lengths, Ids, Rows]:
        """Move the first page still read to where requests with `new.ends` whole pages need it. Returns where it was,
        and the pages that have been passed, with the request of each."""
        firsts = self.first[new.rows]
        after = np.maximum(firsts, self.reach.first(new.ends))
        self.first[new.rows] = after
        return firsts, *pages_between(new.table, new.rows, firsts, after)

    def _ranks(self, kvs: Sequence[RequestKV], firsts: Lengths, ends: Lengths) -> NDArray[np.int8] | None:
        """What pages `firsts[i]` up to `ends[i]` of each request are good for: the resume points that need them. None
        where none does."""
        starts = firsts.tolist()
        if not any(kv.marks and max(kv.marks) > start for kv, start in zip(kvs, starts, strict=True)):
            return None
        ranks = bytearray(int((ends - firsts).sum()))
        at = 0
        for kv, first, end in zip(kvs, starts, ends.tolist(), strict=True):
            for num_pages, rank in kv.marks.items() if end > first else ():
                if num_pages > first:
                    start = max(first, self.reach.first(num_pages))
                    for place in range(at + start - first, at + min(end, num_pages) - first):
                        ranks[place] = max(ranks[place], rank)
            at += end - first
        return np.frombuffer(ranks, dtype=np.int8)


def pages_between(table: Ids, rows: Rows, starts: Lengths, ends: Lengths) -> tuple[Ids, Rows]:
    """Pages `starts[i]` up to `ends[i]` of each row, one row's behind the other's, a copy; and the i of each."""
    counts = ends - starts
    owners = np.repeat(np.arange(len(rows)), counts)
    places = np.arange(len(owners)) + (starts - (np.cumsum(counts) - counts))[owners]
    pages: Ids = table[rows[owners], places]
    return pages, owners


def _distinct(pages: Ids) -> list[Ids]:
    """The same pages in the same order, in parts without repetition: requests that share a page pass it together."""
    parts: list[Ids] = []
    while len(pages):
        if len(set(pages.tolist())) == len(pages):
            return [*parts, pages]
        once = np.zeros(len(pages), dtype=np.bool_)
        once[np.unique(pages, return_index=True)[1]] = True
        parts.append(pages[once])
        pages = pages[~once]
    return parts
