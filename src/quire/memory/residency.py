"""Residency: the frame and state of every page. No other table maps pages to frames.

    (tier, group, page) -> frame    where its bytes are or will be; 0: nowhere
                           state    RESIDENT, ARRIVING, DAMAGED ...
                           pins     holds that keep it there
                           rank     what its frame is good for, once it is idle

A page can be in one group and absent in another, and both on the device and on the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from quire.errors import MissingFrame
from quire.lazy_queue import LazyQueue
from quire.memory.runs import as_index, counting
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.rank import Rank

_NO_PAGES: Ids = np.empty(0, dtype=np.int32)


class State(IntFlag):
    """States of a page in one group and tier."""

    ABSENT = 0
    RESIDENT = 1  # the page has a frame, or a store has its bytes
    ARRIVING = 2  # its bytes are being copied: readers wait
    DAMAGED = 4  # its bytes are wrong
    FETCHED = 8  # loaded from a store and not used by a request yet
    TOUCHED = 16  # its use was reported to the store in this period
    WATCHED = 32  # the canary has it as cached
    STAMPED = 64  # and what its bytes were


_ABSENT, _RESIDENT = int(State.ABSENT), int(State.RESIDENT)  # numpy converts members of enumerations more slowly


class Column:
    """One group in one tier. Page ids run from 1 to `num_pages` and are distinct within a call. With `reclaims`, frames
    can be reclaimed before their pages are freed. A frame of a cached page without pins is then *idle*, and `reclaim`
    frees idle frames by rank, the longest idle first."""

    def __init__(self, name: str, num_pages: int, *, reclaims: bool) -> None:
        self.name = name
        self.num_pages = num_pages
        self.mapping: Ids = np.zeros(num_pages + 2, dtype=np.int32)
        """Frame of each page, int32 `[num_pages + 2]`, live and read-only for callers; 0: none, -1: of page -1."""
        self.mapping[-1] = -1
        self.frame: Ids = self.mapping[:-1]
        self.state = np.zeros(num_pages + 1, dtype=np.uint8)
        self._up = counting(num_pages + 1)
        self.reclaims = reclaims
        size = num_pages + 1 if reclaims else 0
        self.pins = np.zeros(size, dtype=np.int32)
        self.rank = np.zeros(size, dtype=np.int8)
        self.ticket = np.zeros(size, dtype=np.int64)
        """The valid queue entry of each page; 0 if its frame is not idle."""
        self.num_idle = 0
        self.num_pinned = 0
        self._queues = defaultdict[int, tuple[LazyQueue[Ids], ...]](self._new_queues)  # queues by owner and rank
        self._next_ticket = 1

    # -- reading

    def present(self, pages: Ids) -> Bools:
        """Per page: whether it has a frame here."""
        present: Bools = self.frame[pages] != 0
        return present

    def frames(self, pages: Ids) -> Ids:
        """The frames of these pages. Raises MissingFrame if one has none."""
        found = self.frame[pages]
        if np.count_nonzero(found) != found.size:
            raise self.missing(pages)
        return found

    def missing(self, pages: Ids) -> MissingFrame:
        """The error for the first of these pages without a frame."""
        page = int(pages[self.frame[pages] == 0][0])
        return MissingFrame(f"page {page} is read in group '{self.name}' and has no frame there.")

    def has(self, pages: Ids, state: State) -> Bools:
        """Per page: whether `state` is set."""
        found: Bools = (self.state[pages] & np.uint8(state)) != 0
        return found

    # -- edits

    def bind(self, pages: Ids, frames: Ids) -> None:
        """Bind `frames` to these pages, none of which has a frame."""
        at = as_index(pages, self._up)
        assert not np.count_nonzero(self.frame[at]), "bind over a page that has a frame"
        self.frame[at] = frames
        self.state[at] = _RESIDENT

    def unbind(self, pages: Ids) -> Ids:
        """Unbind the frames of these pages and return them. Pages without one are skipped."""
        at = as_index(pages, self._up)
        frames: Ids = self.frame[at]
        if np.count_nonzero(frames) != len(frames):
            at = pages = pages[frames != 0]
            frames = frames[frames != 0]
        elif isinstance(at, slice):
            frames = frames.copy()
        if self.reclaims:
            self._remove(pages)
        self.frame[at] = 0
        self.state[at] = _ABSENT
        return frames

    def move(self, old_pages: Ids, new_pages: Ids) -> None:
        """Move the frames of `old_pages`, all resident, to `new_pages`, none resident, in order."""
        assert len(old_pages) == len(new_pages), "a frame for each page"
        frames = self.frame[old_pages]
        assert frames.all(), "move from a page that has no frame"
        assert not self.frame[new_pages].any(), "move over a page that has a frame"
        self.state[new_pages] = self.state[old_pages]
        self.frame[old_pages] = 0
        self.state[old_pages] = State.ABSENT
        self.frame[new_pages] = frames

    def rebind(self, sources: Ids, targets: Ids) -> Ids:
        """Bind frames `targets` in place of `sources`, which ascend, to the pages that have these, and return the
        pages. What is known of the pages stays. O(num_pages)."""
        found = self.frame
        pages: Ids = np.flatnonzero((found >= sources[0]) & (found <= sources[-1])).astype(np.int32)
        at = sources.searchsorted(found[pages])
        known = sources[at] == found[pages]
        pages = pages[known]
        self.frame[pages] = targets[at[known]]
        return pages

    def mark(self, pages: Ids, state: State) -> None:
        """Set `state` until `unmark`, or until the pages lose their frames."""
        self.state[pages] |= np.uint8(state)

    def unmark(self, pages: Ids | slice, state: State) -> None:
        """Clear `state`."""
        self.state[pages] &= np.uint8(0xFF ^ state)

    # -- frames that can be reclaimed before their pages. Without `reclaims`, pin, unpin and put do nothing

    def num_idle_of(self, pages: Ids) -> int:
        """How many of these pages' frames `reclaim` could free now."""
        return int(np.count_nonzero(self.ticket[pages]))

    def pin(self, pages: Ids, rank: Rank = Rank.PASSED) -> None:
        """Add a hold to each of these frames."""
        if not self.reclaims:
            return
        self._unqueue(pages)
        pins = self.pins[pages]
        self.num_pinned += len(pages) - int(np.count_nonzero(pins))
        self.pins[pages] = pins + 1
        self._raise_rank(pages, rank)

    def unpin(self, pages: Ids, rank: Rank = Rank.PASSED) -> None:
        """Remove a hold from each; frames without holds become idle, in this order."""
        if not self.reclaims:
            return
        pins = self.pins[pages] - 1
        assert np.minimum.reduce(pins, initial=0) >= 0, "a page was unpinned that nothing pins"
        self.pins[pages] = pins
        self._raise_rank(pages, rank)
        free = pages[pins == 0]
        self.num_pinned -= len(free)
        self._queue(free)

    def put(self, pages: Ids, rank: Rank) -> None:
        """Make unpinned frames of these cached pages idle, as if used now."""
        if not self.reclaims:
            return
        free = pages[self.pins[pages] == 0]
        self._unqueue(free)
        self._raise_rank(pages, rank)
        self._queue(free)

    def reclaim(self, num_frames: int, most: Rank = Rank.USED, owner: int = 0) -> Ids:
        """Up to `num_frames` pages with idle frames for the caller to unbind, lowest rank first, at most `most`; where
        pages have owners (`quire.cache.page_owners`), those of one."""
        victims: list[Ids] = []
        left = num_frames
        for queue in self._queues[owner][: most + 1]:
            while left > 0 and (entry := queue.pop()) is not None:
                pages = entry.item
                if len(pages) > left:
                    queue.put_back(entry._replace(item=pages[left:]))
                    pages = pages[:left]
                left -= len(pages)
                victims.append(pages)
        if not victims:
            return _NO_PAGES
        found = np.concatenate(victims)
        self._remove(found)
        return found

    def _remove(self, pages: Ids) -> None:
        assert not np.count_nonzero(self.pins[pages]), "a pinned page was removed"
        self._unqueue(pages)
        self.rank[pages] = 0

    def _raise_rank(self, pages: Ids, rank: Rank) -> None:
        if rank > Rank.PASSED:
            self.rank[pages] = np.maximum(self.rank[pages], int(rank))

    def _new_queues(self) -> tuple[LazyQueue[Ids], ...]:
        return tuple(LazyQueue(self._live, size=len) for _ in Rank)

    def _unqueue(self, pages: Ids) -> None:
        """Frames of these pages are not idle any more."""
        self.num_idle -= self.num_idle_of(pages)
        self.ticket[pages] = 0

    def _queue(self, pages: Ids, owner: int = 0) -> None:
        """Frames of these pages, of one owner, are idle."""
        self.num_idle += len(pages)
        ranks = self.rank[pages]
        for rank, queue in enumerate(self._queues[owner]):  # a plain number: an array compares with it much faster
            part = pages[ranks == rank]
            if len(part):
                self.ticket[part] = self._next_ticket
                queue.push(self._next_ticket, part.copy())
                self._next_ticket += 1

    def _live(self, ticket: int, pages: Ids) -> Ids | None:
        found = pages[self.ticket[pages] == ticket]
        return found if len(found) else None


@dataclass(frozen=True, slots=True)
class PageTableChanges:
    """Entries of page tables to update on the device: `places` are `row * pages_per_row + page`, int32 `[k]`. `frames`
    are the new values, int32 `[groups, k]`, for groups in which each page has its own frame."""

    places: Ids
    frames: Ids

    def __len__(self) -> int:
        return len(self.places)


class Residency:
    """The residency table of one cache. `names` and `reclaims` are by group; `tiers` are those in which pages have
    frames, and `device` makes the columns of the device. In groups `on_host` the frame of a page is its id, in host
    memory. The anchor of a tier determines which pages are on it. It is the column of `anchor_group`, the first other
    group in which pages keep their frames for as long as they exist. If that is None, it is one of the pages."""

    def __init__(
        self,
        num_pages: int,
        names: Sequence[str],
        reclaims: Sequence[bool],
        tiers: Sequence[Tier] = (Tier.DEVICE,),
        on_host: Collection[int] = (),
        device: Callable[..., Column] = Column,
    ) -> None:
        self.num_pages = num_pages
        makes = {**dict.fromkeys(tiers, Column), Tier.DEVICE: device}
        self._columns = {
            (tier, group): make(name, num_pages, reclaims=reclaims[group])
            for tier, make in makes.items()
            for group, name in enumerate(names)
        }
        others = (group for group, each in enumerate(reclaims) if not each and group not in on_host)
        whole = self.anchor_group = next(others, None)
        self._anchors = {
            tier: make("pages", num_pages, reclaims=False) if whole is None else self._columns[tier, whole]
            for tier, make in makes.items()
        }

    def of(self, tier: Tier, group: int) -> Column:
        """The column of a group in a tier."""
        return self._columns[tier, group]

    def anchor(self, tier: Tier) -> Column:
        """The column that determines which pages are on a tier."""
        return self._anchors[tier]

    # -- edits of the anchor if it is no group; otherwise these do nothing, since the group's edits suffice

    def add_pages(self, pages: Ids, tier: Tier = Tier.DEVICE) -> None:
        """Mark these pages, which are not on a tier, as being on it."""
        if self.anchor_group is None:
            self._anchors[tier].bind(pages, pages)

    def remove_pages(self, tier: Tier, pages: Ids) -> None:
        """Mark these pages as not being on a tier. Pages that are not on it are skipped."""
        if self.anchor_group is None:
            self._anchors[tier].unbind(pages)

    def replace_pages(self, ours: Ids, theirs: Ids) -> None:
        """Mark `theirs` as being on the device in place of `ours`, if they are not there already."""
        if self.anchor_group is None:
            missing = ~self._anchors[Tier.DEVICE].present(theirs)
            self._anchors[Tier.DEVICE].move(ours[missing], theirs[missing])
