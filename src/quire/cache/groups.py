"""GroupCache: the frames of one group, as requests begin, grow, settle and end.

`KVCache` calls the same methods of every group. The class of a group follows from its reach:

    WholeGroup     a cached page always has its frame
    PassingGroup   a request reads a window; frames that the window has passed may go while their pages stay
    CarriedGroup   a request rewrites its own frame, and leaves older ones to pages (`quire.cache.carried`)
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
    """What a request gives up in one group, once no launched step touches it any more."""

    group: int
    unpinned: Ids = field(default_factory=lambda: NO_PAGES)  # cached pages that it no longer reads
    rank: Rank = Rank.PASSED  # of their frames, once idle
    dropped: Ids = field(default_factory=lambda: NO_PAGES)  # private pages whose frames it no longer reads
    frames: Ids = field(default_factory=lambda: NO_PAGES)  # its own frames


@dataclass(frozen=True, slots=True)
class Pieces:
    """Work of one step in one carried group: consecutive runs of tokens, request by request, in order.

    Piece i has `lengths[i]` tokens. It starts from frame `sources[i]` (0: from nothing) and writes frame `targets[i]`.
    """

    lengths: Ids
    sources: Ids
    targets: Ids


Launched = tuple[Pieces, list[Given]]
"""The pieces of a step, and what its requests give up by launching it."""


@dataclass(frozen=True, slots=True)
class NewPages:
    """Whole pages that have settled: pages `starts[i]..ends[i]` of request `kvs[i]` in row `rows[i]`. `table` holds the
    pages of all rows, int32 `[rows, width]`."""

    kvs: Sequence[RequestKV]
    rows: Rows
    starts: Lengths
    ends: Lengths
    table: Ids

    def pages(self) -> Ids:
        """Their ids, request by request."""
        return pages_between(self.table, self.rows, self.starts, self.ends)[0]


class GroupCache(ABC):
    """One group. `row` is a request's row, `pages` are its pages from the first on. Counters are explained in
    `quire.cache.statistics.FrameCounts`."""

    frames: PageFrames | SlotFrames

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
        """Frames that are not handed out."""
        return self.frames.num_free

    @property
    def num_evictable(self) -> int:
        """Frames of cached pages that eviction can free."""
        return self.table.num_idle if self.table.reclaims else self._tree.num_evictable

    @property
    def num_cached(self) -> int:
        """Frames of cached pages."""
        table = self.table
        return table.num_idle + table.num_pinned if table.reclaims else self._tree.num_pages

    @abstractmethod
    def would_pin(self, pages: Ids, evictable: int) -> int:
        """Evictable frames that a request that begins after `pages` will pin. `evictable` of these pages can go now."""

    @abstractmethod
    def needs(self, num_pages: int, num_cached: int) -> int:
        """The most frames that a request of `num_pages` pages takes at once, where `num_cached` of them are cached."""

    @abstractmethod
    def remaining(self, rows: Rows, have: Lengths, reached: Lengths) -> int:
        """The most frames that these rows, which have `have[i]` pages, will take until they have `reached[i]`."""

    @abstractmethod
    def wanted(self, rows: Rows, num_new: int) -> int:
        """Frames that these rows take next, with `num_new` new pages in all."""

    def reserve(self, num_pages: int) -> int:
        """Frames to reserve for running requests that may take `num_pages` new pages in the next step."""
        return num_pages

    def begin(self, row: int, pages: Ids) -> None:  # noqa: B027 - only what is read in part is pinned
        """A request begins after these cached pages."""

    @abstractmethod
    def take(self, rows: Rows, new_pages: Ids) -> None:
        """Take the frames that `wanted` counts. Raises OutOfPages and changes nothing. `grow`, which cannot fail, or
        `untake` follows with the same pages."""

    @abstractmethod
    def untake(self, new_pages: Ids) -> None:
        """Free what `take` took."""

    def grow(self, rows: Rows, new_pages: Ids) -> None:  # noqa: B027 - frames of pages are theirs when taken
        """Give what `take` took to these pages or rows."""

    def launch(
        self, kvs: Sequence[RequestKV], rows: Rows, ends: Lengths, draws: Lengths | None, table: Ids, *, leaves: bool
    ) -> Launched | None:
        """The work of a step, up to `ends[i]` tokens, on the frames that requests carry; None where they carry none.

        The step draws `draws[i]` tokens, by default one at most: all but the first after drafts, its last tokens.
        `table` holds all rows of pages. `leaves`: frames may be left for others.
        """
        return None

    def settle(self, row: int, num_tokens: int) -> None:  # noqa: B027 - only frames that are carried hear of it
        """The first `num_tokens` tokens have settled; some of them may have been drafts."""

    def is_pending(self, row: int, num_pages: int) -> bool:
        """Whether others cannot yet begin after the row's first `num_pages` pages, which are settled, but will."""
        return False

    def frees(self, rows: Rows, num_pages: Lengths) -> Bools:
        """Per row, with `num_pages[i]` settled whole pages: whether a commit frees frames."""
        return np.zeros(len(rows), dtype=np.bool_)

    @abstractmethod
    def commit(self, new: NewPages, ours: Ids, theirs: Ids) -> list[Given]:
        """These pages are cached. The cached pages `theirs` replaced the private duplicates `ours`."""

    def passed(self, new: NewPages) -> list[Given]:
        """As `commit` for requests that share nothing: only the pages that they began on are cached."""
        return []

    def finish(self, row: int, pages: Ids, protected: int) -> list[Given]:
        """A request with these pages ends. The first `protected` are whole and settled."""
        return []

    def give_back(self, given: Given) -> None:
        """Free what a request has given up."""
        raise AssertionError("nothing is given up in a group that is read as a whole")

    @abstractmethod
    def restore(self, pages: Ids) -> Ids:
        """Give a frame, to be loaded, to each of these cached pages without one; there is room. Returns the frames."""

    def forget(self, pages: Ids) -> None:
        """Free the frames of pages that leave the cache."""
        self.frames.drop(pages)

    def evict(self, num_frames: int) -> int:
        """Free up to `num_frames` frames of cached pages, which stay. Returns how many."""
        return 0

    def pinned(self, row: int, pages: Ids) -> Ids:
        """The pages among a row's cached `pages` that it pins."""
        return NO_PAGES

    def frames_of(self, row: int) -> Ids:
        """Frames that a row owns beside those of its pages, unordered."""
        return NO_PAGES

    def books(self) -> tuple[object, ...]:
        """All data about rows, for comparison by snapshots."""
        return ()


class WholeGroup(GroupCache):
    """Every page of a prefix is read by all later tokens: a frame goes with its page."""

    frames: PageFrames

    def would_pin(self, pages: Ids, evictable: int) -> int:
        return evictable

    def needs(self, num_pages: int, num_cached: int) -> int:
        return num_pages - num_cached

    def remaining(self, rows: Rows, have: Lengths, reached: Lengths) -> int:
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
        """Cached pages without a frame take over the frames of the request's duplicates."""
        if len(ours):
            missing = ~self.table.present(theirs)
            self.table.move(ours[missing], theirs[missing])
            self.revived_frames += int(np.count_nonzero(missing))


class PassingGroup(WholeGroup):
    """A request reads only its last pages. It pins the cached frames that it reads; frames it has passed are idle.

    |-- passed: may be dropped --|-- read: pinned --|-- read: private --|
    0                            first[row]         protected           allocated
    """

    def __init__(self, index: int, reach: Reach, frames: PageFrames, tree: RadixCache, max_requests: int) -> None:
        super().__init__(index, reach, frames, tree)
        self._held = reach.held(sys.maxsize)
        self.first = np.zeros(max_requests, dtype=np.int64)  # the first page that each row still reads

    def would_pin(self, pages: Ids, evictable: int) -> int:
        return self.table.num_idle_of(pages[self.reach.first(len(pages)) :])

    def needs(self, num_pages: int, num_cached: int) -> int:
        read = num_cached - self.reach.first(num_cached)  # pinned from the start
        return min(num_pages - num_cached, max(1, self.reach.held(num_pages) - read))

    def remaining(self, rows: Rows, have: Lengths, reached: Lengths) -> int:
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

    def finish(self, row: int, pages: Ids, protected: int) -> list[Given]:
        read = pages[self.first[row] : protected]
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
        """Move `first` to where requests with `new.ends` whole pages need it. Returns where it was, the pages passed,
        and the index of each one's request."""
        firsts = self.first[new.rows]
        after = np.maximum(firsts, self.reach.first(new.ends))
        self.first[new.rows] = after
        return firsts, *pages_between(new.table, new.rows, firsts, after)

    def _ranks(self, kvs: Sequence[RequestKV], firsts: Lengths, ends: Lengths) -> NDArray[np.int8] | None:
        """The ranks of pages `firsts[i]..ends[i]`, from the resume points that read them. None where none does."""
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
    """Pages `starts[i]..ends[i]` of each row, row by row, a copy; and the i of each."""
    counts = ends - starts
    owners = np.repeat(np.arange(len(rows)), counts)
    places = np.arange(len(owners)) + (starts - (np.cumsum(counts) - counts))[owners]
    pages: Ids = table[rows[owners], places]
    return pages, owners


def _distinct(pages: Ids) -> list[Ids]:
    """The same pages in parts without repetition: requests that share a page may pass it together."""
    parts: list[Ids] = []
    while len(pages):
        if len(set(pages.tolist())) == len(pages):
            return [*parts, pages]
        once = np.zeros(len(pages), dtype=np.bool_)
        once[np.unique(pages, return_index=True)[1]] = True
        parts.append(pages[once])
        pages = pages[~once]
    return parts
