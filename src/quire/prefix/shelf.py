"""Shelf: which cached frames of one group may be dropped while their pages stay cached, and in which order.

Only groups of which a request needs a part have one. Tail first, which is right for pages (`RadixCache.evict`), is
wrong here: the tail of a prefix is what the next request resumes on. So frames go by what they are good for, and
within that the longest unused first, those of one release in the order of their pages:

    PASSED   read by nobody's next token: a resume point only for prefixes that end by chance right there
    MARKED   where a request may well begin again: the end of a prompt
    USED     where one ended, or began, or where two prefixes part
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from quire.spec.ids import Bools, Ids

_NO_PAGES: Ids = np.empty(0, dtype=np.int32)


class Rank(IntEnum):
    """What a cached frame is good for; lower ranks are dropped first."""

    PASSED = 0
    MARKED = 1
    USED = 2


class Shelf:
    """The cached frames of one group by page: pinned by running requests, or on the shelf. It frees nothing itself.

    A page enters with `put` or `pin`, and leaves with `evict` or `remove`. Ranks only rise while a page is here.
    """

    def __init__(self, num_pages: int) -> None:
        self._pins = np.zeros(num_pages + 1, dtype=np.int32)
        self._rank = np.zeros(num_pages + 1, dtype=np.int8)
        self._ticket = np.zeros(num_pages + 1, dtype=np.int64)  # of the valid entry in a queue; 0: not on the shelf
        self._queues: tuple[deque[tuple[int, Ids]], ...] = tuple(deque() for _ in Rank)
        self._next = 1
        self._queued = 0  # pages in the queues, outdated entries included
        self.num_evictable = 0
        self.num_pinned = 0

    @property
    def num_pages(self) -> int:
        """Cached pages that have a frame here."""
        return self.num_evictable + self.num_pinned

    def pins(self, pages: Ids | slice) -> Ids:
        """Per page: how many requests pin it."""
        return self._pins[pages]

    def ranks(self, pages: Ids) -> NDArray[np.int8]:
        """Per page: what its frame is good for, as far as is known."""
        return self._rank[pages]

    def on_shelf(self, pages: Ids | slice) -> Bools:
        """Per page: whether it could be evicted now."""
        shelved: Bools = self._ticket[pages] != 0
        return shelved

    def books(self) -> tuple[object, ...]:
        """Its pins and tickets, for whoever compares what is with what was."""
        return self._pins.tobytes(), self._ticket.tobytes(), self.num_evictable, self.num_pinned

    def num_on_shelf(self, pages: Ids) -> int:
        """How many of these pages could be evicted now."""
        return int(np.count_nonzero(self._ticket[pages]))

    def pin(self, pages: Ids, rank: Rank = Rank.PASSED) -> None:
        """One more request reads these pages (distinct); those on the shelf leave it, others enter."""
        shelved = self._ticket[pages] != 0
        self.num_evictable -= int(np.count_nonzero(shelved))
        self._ticket[pages] = 0
        self.num_pinned += int(np.count_nonzero(self._pins[pages] == 0))
        self._pins[pages] += 1
        self._raise_rank(pages, rank)

    def unpin(self, pages: Ids, rank: Rank) -> None:
        """A request that pinned these pages no longer reads them; what nobody pins goes on the shelf, in this order."""
        assert (self._pins[pages] > 0).all(), "a page was unpinned that nobody pins"
        self._pins[pages] -= 1
        self._raise_rank(pages, rank)
        free = pages[self._pins[pages] == 0]
        self.num_pinned -= len(free)
        self._shelve(free)

    def put(self, pages: Ids, rank: Rank) -> None:
        """These pages have a frame now that nobody pins; those here already are as if used now."""
        self._raise_rank(pages, rank)
        free = pages[self._pins[pages] == 0]
        shelved = self._ticket[free] != 0
        self.num_evictable -= int(np.count_nonzero(shelved))
        self._shelve(free)

    def remove(self, pages: Ids) -> None:
        """These pages, pinned by nobody, leave the tree or have no frame any more; unknown ones are passed over."""
        assert not self._pins[pages].any(), "a pinned page was removed"
        self.num_evictable -= self.num_on_shelf(pages)
        self._ticket[pages] = 0
        self._rank[pages] = 0

    def evict(self, num_pages: int, most: Rank = Rank.USED) -> Ids:
        """Take up to `num_pages` pages off the shelf, lowest rank first, none above rank `most`. O(evicted)."""
        victims: list[Ids] = []
        left = num_pages
        for queue in self._queues[: most + 1]:
            while left > 0 and queue:
                ticket, pages = queue.popleft()
                self._queued -= len(pages)
                live = pages[self._ticket[pages] == ticket]
                if len(live) > left:
                    queue.appendleft((ticket, live[left:]))
                    self._queued += len(live) - left
                    live = live[:left]
                left -= len(live)
                victims.append(live)
        found = np.concatenate(victims) if victims else _NO_PAGES
        self.remove(found)
        return found

    def _raise_rank(self, pages: Ids, rank: Rank) -> None:
        if rank > Rank.PASSED:
            self._rank[pages] = np.maximum(self._rank[pages], rank)

    def _shelve(self, pages: Ids) -> None:
        """Queue pages that nobody pins, as used now."""
        self.num_evictable += len(pages)
        for rank, queue in zip(Rank, self._queues, strict=True):
            part = pages[self._rank[pages] == rank]
            if len(part):
                self._ticket[part] = self._next
                queue.append((self._next, part.copy()))
                self._next += 1
                self._queued += len(part)
        if self._queued > 64 + 4 * self.num_evictable:
            self._forget_outdated()

    def _forget_outdated(self) -> None:
        self._queued = 0
        for queue in self._queues:
            live = [(ticket, pages[self._ticket[pages] == ticket]) for ticket, pages in queue]
            queue.clear()
            queue.extend((ticket, pages) for ticket, pages in live if len(pages))
            self._queued += sum(len(pages) for _, pages in queue)
