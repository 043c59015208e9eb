"""GroupCache: the frames of one group, as requests begin, grow, settle and end.

Both classes have the same methods, which `PagedGroup` explains. The class of a group follows from its reach:

    PagedGroup    each page of a request has a frame; where the reach is a part of the pages, frames before that part
                  are idle, and may be reclaimed while their pages stay cached
    StateGroup    a request updates its own frame in place, and stores older ones with pages (`quire.cache.states`)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.request_kv import RequestKV
from quire.cache.room import Room
from quire.cache.running import Lengths, Rows
from quire.memory.allocator import GroupFrames, PageFrames, SlotFrames
from quire.memory.residency import Column, State
from quire.memory.runs import in_order
from quire.prefix.radix_cache import RadixCache
from quire.prefix.reach import Reach
from quire.spec.ids import Bools, Ids
from quire.spec.rank import Rank

NO_PAGES: Ids = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class GroupRelease:
    """What a request releases in one group when no launched step reads it any more."""

    group: int
    unpinned: Ids = field(default_factory=lambda: NO_PAGES)  # pages that it no longer reads
    rank: Rank = Rank.PASSED  # ranks of their frames, once idle
    frames: Ids = field(default_factory=lambda: NO_PAGES)  # its own frames


@dataclass(frozen=True, slots=True)
class NewPages:
    """Settled pages `starts[i]..ends[i]` of request `kvs[i]` in row `rows[i]`; `table` is int32 `[all rows, width]`."""

    kvs: Sequence[RequestKV]
    rows: Rows
    starts: Lengths
    ends: Lengths
    table: Ids


class GroupBase:
    """One group. Counters are explained in `quire.cache.statistics.FrameCounts`."""

    def __init__(self, index: int, reach: Reach, frames: PageFrames | SlotFrames, tree: RadixCache) -> None:
        self.index = index
        self.name = frames.name
        self.num_frames = frames.num_frames
        self.reach = reach
        self.frames = frames
        self.table: Column = frames.table
        self.dropped_frames = self.revived_frames = self.left = self.skipped = 0
        self.quarantined: list[int] = []  # frames whose bytes changed by themselves, the oldest first
        self.room: Room  # what it shares with other groups, or has alone
        self.may_keep: Callable[[int, int, Rank], bool] | None = None  # see `Tenants.may_keep`
        self._tree = tree

    @property
    def num_free(self) -> int:
        """Frames that can be allocated now; in an arena, as the other group lies."""
        return self.frames.num_free

    @property
    def num_evictable(self) -> int:
        """Frames of cached pages that eviction can free."""
        return self.table.num_idle if self.table.reclaims else self._tree.num_evictable

    @property
    def num_held(self) -> int:
        """Frames in use that eviction cannot free."""
        return self.frames.num_used - self.num_evictable

    @property
    def num_optional(self) -> int:
        """Frames that running requests hold, and give up where groups share a room that is short."""
        return 0

    @property
    def num_cached(self) -> int:
        """Frames of cached pages."""
        table = self.table
        return table.num_idle + table.num_pinned if table.reclaims else self._tree.num_pages

    def set_apart(self, frame: int) -> None:
        """An allocated frame that no page has is not used until `use_again`: its bytes changed by themselves."""
        self.quarantined.append(frame)
        self.frames.allocator.ids.set_apart(frame)

    def use_again(self, frame: int) -> None:
        """Free a frame that was set apart."""
        self.quarantined.remove(frame)
        self.frames.allocator.ids.use_again(frame)
        self.frames.free_frames(np.array([frame], dtype=np.int32))

    def moved(self, sources: Ids, targets: Ids) -> Ids:
        """Frames have other ids: `targets` instead of `sources`, which ascend. Returns the pages that have them."""
        return self.table.rebind(sources, targets)

    def needed_pages(self, pages: Ids) -> Ids:
        """The pages that a request that begins after all of `pages` reads; a view."""
        needed = self.reach.needed(len(pages))
        return pages[needed.start : needed.stop]


class PagedGroup(GroupBase):
    """A frame for each page. A request pins the cached frames that it reads, if it does not read all of them. `row` is
    a request's row, `pages` are its pages from the first one.

    |-- passed: idle, may be reclaimed --|-- read: pinned --|-- read: private --|
    0                                    first[row]         protected           allocated
    """

    frames: PageFrames
    may_free = True  # whether `frees` may find any

    def __init__(self, index: int, reach: Reach, frames: PageFrames, tree: RadixCache, max_requests: int) -> None:
        super().__init__(index, reach, frames, tree)
        self._held = reach.held(sys.maxsize)
        self.first = np.zeros(max_requests, dtype=np.int64)  # the first page that each row still reads

    def would_pin(self, pages: Ids, evictable: int) -> int:
        """Evictable frames that a request on `pages` would pin. `evictable` of these pages can be evicted now."""
        return evictable if self.reach.whole else self.table.num_idle_of(self.needed_pages(pages))

    def needs(self, num_pages: int, num_cached: int) -> int:
        """The most frames that a request of `num_pages` pages uses at once, if `num_cached` of them are cached."""
        read = num_cached - self.reach.first(num_cached)  # pinned from the start
        return min(num_pages - num_cached, max(1, self.reach.held(num_pages) - read))

    def remaining(self, rows: Rows, have: Lengths, reached: Lengths) -> Lengths:
        """The most frames that each of these rows, with `have[i]` pages, will allocate until it has `reached[i]`."""
        if self.reach.whole:
            return reached - have
        most = np.minimum(reached, self._held)
        found: Lengths = np.clip(most - (have - self.first[rows]), 0, np.maximum(0, reached - have))
        return found

    def wanted(self, rows: Rows, num_new: int) -> int:
        """Frames that these rows allocate next, with `num_new` new pages in all."""
        return num_new

    def begin(self, row: int, pages: Ids) -> None:
        """A request begins after these cached pages. Not called if the group is read as a whole."""
        first = self.first[row] = self.reach.first(len(pages))
        self.table.pin(pages[first:], Rank.USED)

    def take(self, rows: Rows, new_pages: Ids) -> None:
        """Allocate what `wanted` counts. Raises OutOfPages, changing nothing; else `grow` or `untake` follows."""
        self.frames.take(new_pages)

    def untake(self, new_pages: Ids) -> None:
        """Free what `take` took."""
        self.frames.drop(new_pages)

    def grow(self, rows: Rows, new_pages: Ids) -> None:
        """Give these rows the frames that `take` allocated. In this class the pages get them."""

    def frees(self, rows: Rows, num_pages: Lengths) -> Bools:
        """Per row, with `num_pages[i]` settled whole pages: whether a commit frees frames."""
        return self.reach.first(num_pages) > self.first[rows]

    def commit(self, new: NewPages, ours: Ids, theirs: Ids) -> list[GroupRelease]:
        """These pages are cached. The cached pages `theirs` replaced the private duplicates `ours`."""
        starts = np.maximum(new.starts, np.minimum(self.first[new.rows], new.ends))  # the others are idle already
        read = int(starts[-1] - new.starts[-1])
        self._revive(ours[read:], theirs[read:])
        if self.reach.whole:
            return []
        pages = pages_between(new.table, new.rows, starts, new.ends)
        for part in _distinct(pages) if len(ours) else (pages,):
            self.table.pin(part)
        firsts, passed = self._advance(new)
        return self._passed(new, firsts, passed)

    def pass_by(self, new: NewPages) -> list[GroupRelease]:
        """As `commit` for settled pages that are private, all but those that their requests have a lease on."""
        firsts, passed = self._advance(new)
        self.table.pin(passed[self.table.pins[passed] == 0])  # requests have pinned the leased ones that they read
        return self._passed(new, firsts, passed)

    def finish(self, row: int, pages: Ids, protected: int) -> list[GroupRelease]:
        """A request with these pages ends. The first `protected` are whole and settled."""
        read = pages[self.first[row] : protected]
        return [GroupRelease(self.index, read.copy(), Rank.USED)] if len(read) else []

    def release(self, released: GroupRelease) -> None:
        """Free what a request has released."""
        self.table.unpin(released.unpinned, released.rank)

    def restore(self, pages: Ids) -> Ids:
        """Allocate a frame for each of these cached pages without one, before a load. Returns the frames."""
        return self.frames.take(pages)

    def evict(self, num_frames: int, most: Rank = Rank.USED, tenant: int = 0) -> int:
        """Reclaim up to `num_frames` idle frames, of at most that rank, of one `tenant`. Returns how many."""
        if self.reach.whole:
            return 0
        pages = in_order(self.table.reclaim(num_frames, most, tenant))  # what follows is faster so
        self.frames.vacate(pages)
        self.dropped_frames += len(pages)
        self._tree.lost(pages)
        return len(pages)

    def pinned(self, row: int, pages: Ids) -> Ids:
        """The cached `pages` of a row that it pins, in a group that is read in part."""
        return pages[int(self.first[row]) :]

    def frames_of(self, row: int) -> Ids:
        """Frames that belong to a row and to none of its pages, unordered."""
        return NO_PAGES

    def num_of(self, row: int, num_pages: int) -> int:
        """Frames that a row of so many pages reads."""
        return num_pages if self.reach.whole else num_pages - int(self.first[row])

    def num_own(self) -> Lengths:
        """How many frames `frames_of` has, by row."""
        return np.zeros(len(self.first), dtype=np.int64)

    def _revive(self, ours: Ids, theirs: Ids) -> None:
        """Cached pages without a frame get the frames of the request's duplicates."""
        if len(ours):
            missing = ~self.table.present(theirs)
            self.frames.move(ours[missing], theirs[missing])
            self.revived_frames += int(np.count_nonzero(missing))

    def _advance(self, new: NewPages) -> tuple[Lengths, Ids]:
        """Move `first` to what `new.ends` pages need. Returns the old `first`, and the passed pages."""
        firsts = self.first[new.rows]
        after = np.maximum(firsts, self.reach.first(new.ends))
        if not np.count_nonzero(after > firsts):
            return firsts, NO_PAGES
        self.first[new.rows] = after
        return firsts, pages_between(new.table, new.rows, firsts, after)

    def _passed(self, new: NewPages, firsts: Lengths, passed: Ids) -> list[GroupRelease]:
        """The release of `passed` pages, all pinned, of which those of request i begin with page `firsts[i]`."""
        ranks = self._ranks(new.kvs, firsts, self.first[new.rows]) if len(passed) else None
        if ranks is None:
            return [GroupRelease(self.index, part) for part in _distinct(passed)]
        by_rank = [(rank, passed[ranks == value]) for value, rank in enumerate(Rank)]
        return [GroupRelease(self.index, part, rank) for rank, some in by_rank for part in _distinct(some)]

    def _ranks(self, kvs: Sequence[RequestKV], firsts: Lengths, ends: Lengths) -> NDArray[np.int8] | None:
        """The ranks of pages `firsts[i]..ends[i]`, from the resume points that read them. None if none does."""
        marked = [
            (at, num_pages, int(rank))
            for at, (kv, start) in enumerate(zip(kvs, firsts.tolist(), strict=True))
            if kv.last_mark > start
            for num_pages, rank in kv.marks.items()
        ]
        if not marked:
            return None
        at, marks, by = np.array(marked, dtype=np.int64).T
        low, high = np.maximum(firsts[at], self.reach.first(marks)), np.minimum(ends[at], marks)
        places = np.cumsum(ends - firsts)[at] - ends[at]  # where page 0 would be
        ranks = np.zeros(int(np.add.reduce(ends - firsts)), dtype=np.int8)
        while len(some := (low < high).nonzero()[0]):  # a page for each, of most the only one
            np.maximum.at(ranks, places[some] + low[some], by[some])
            low += 1
        return ranks


class DamagedPages:
    """Cached pages whose bytes are lost: no request begins on them. `num_marked` counts calls of `mark`. `holders`
    release what they hold of such pages: holds for callers, which would keep them for long."""

    def __init__(self, pages: Column, groups: Sequence[GroupBase]) -> None:
        self._pages = pages
        self.holders: list[Callable[[], None]] = []
        self.num_damaged = self.num_marked = 0
        self._groups = groups

    def are(self, pages: Ids) -> Bools:
        """Per page: whether it is damaged."""
        return self._pages.has(pages, State.DAMAGED)

    def before(self, pages: Ids) -> int:
        """How many of these pages precede the first damaged one."""
        return int(np.argmax(np.append(self.are(pages), True))) if self.num_damaged else len(pages)

    def have_frames(self, pages: Ids) -> bool:
        """Whether a damaged page among these has frames: then nothing can be cached in its place or after it."""
        damaged = pages[self.are(pages)] if self.num_damaged else pages[:0]
        return any(group.table.present(damaged).any() for group in self._groups)

    def mark(self, pages: Ids) -> None:
        """Mark these pages: their bytes are lost."""
        self._pages.mark(pages, State.DAMAGED)
        self._count()
        self.num_marked += 1

    def mend(self, pages: Ids) -> None:
        """Unmark these pages: they were computed again, or have left the cache."""
        if self.num_damaged:
            self._pages.unmark(pages, State.DAMAGED)
            self._count()

    def release_holds(self) -> None:
        """Release what callers hold of damaged pages, so that these can be deleted."""
        for release in self.holders if self.num_damaged else ():
            release()

    def _count(self) -> None:
        self.num_damaged = int(np.count_nonzero(self._pages.state & np.uint8(State.DAMAGED)))


def resume_point(groups: Sequence[GroupBase], pages: Ids, hosts: Sequence[GroupFrames[Any]] = ()) -> tuple[int, str]:
    """The longest part of `pages` after which a request can begin, and the name of the group that limits it, or "".
    `groups` are those that are read in part: in all others a cached page has its frame. `hosts`, one for each group of
    the cache, add frames on the host. O(pages read) if a request can begin after all pages."""
    if all(resident(group, group.needed_pages(pages), hosts).all() for group in groups):
        return len(pages), ""
    masks = [group.reach.resumable(resident(group, pages, hosts)) for group in groups]
    ends = np.flatnonzero(np.logical_and.reduce(masks))
    num_pages = int(ends[-1]) + 1 if len(ends) else 0
    return num_pages, next((group.name for group, mask in zip(groups, masks, strict=True) if not mask[-1]), "")


def resident(group: GroupBase, pages: Ids, hosts: Sequence[GroupFrames[Any]] = ()) -> Bools:
    """Per page: whether it has a frame on the device or in `hosts`."""
    found = group.table.present(pages)
    return found | hosts[group.index].table.present(pages) if hosts else found


def pages_between(table: Ids, rows: Rows, starts: Lengths, ends: Lengths) -> Ids:
    """Pages `starts[i]..ends[i]` of each row, row by row, a copy."""
    counts = ends - starts
    if np.count_nonzero(counts == 1) < len(rows):
        starts = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        rows = np.repeat(rows, counts)
    pages: Ids = table[rows, starts]
    return pages


def _distinct(pages: Ids) -> list[Ids]:
    """These pages in parts without repetition: requests that share a page may pass it together."""
    parts: list[Ids] = []
    while len(pages):
        if len(set(pages.tolist())) == len(pages):
            return [*parts, pages]
        once = np.zeros(len(pages), dtype=np.bool_)
        once[np.unique(pages, return_index=True)[1]] = True
        parts.append(pages[once])
        pages = pages[~once]
    return parts
