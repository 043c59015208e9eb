"""LRUBound and Guard: how much LRU would have hit, counted without a second cache, and whether to leave eviction to it.

    last use    ... 3   4 | 5   6   7   8   9      ticks, one for each request
    pages           6   2 | 9   4   0   5   7      that were last used then, wherever they are now
                          |
                       horizon: the pages behind it are as many as the tree has

LRU keeps what was used last, in the same room. So it has a page exactly if its last use is behind the horizon.
"""

from __future__ import annotations

import logging

from quire.prefix.node import ID_BYTES, Node

logger = logging.getLogger(__name__)

LIMITS = 1.5, 4.5  # requests of mean length: hits that the order may lose until LRU decides alone, at first and at most
LIMIT_GROWS = 0.0015  # with each request
CREDIT = 5.0  # requests of mean length: largest positive balance
FORGIVEN = 4096  # requests in which a loss fades to a third
FIRST_WAIT = 256  # requests that LRU decides
LONGER = 4  # times, after each trial that fails
LONGEST_WAIT = 1 << 16
_MEAN_OVER = 1024  # requests


class LRUBound:
    """Counts pages by the tick of their last use. O(1) amortised for each node that a request uses, and memory for each
    tick that pages were last used at."""

    def __init__(self) -> None:
        self.now = 1
        self.num_pages = 0
        """Pages that LRU would have now."""
        self.horizon = 1
        """No page of LRU was last used before this tick."""
        self._pages = {1: 0}  # pages by tick; only that of `now` may be 0

    def limit(self, num_pages: int) -> None:
        """LRU evicts, until it has `num_pages` pages."""
        excess, pages, tick = self.num_pages - num_pages, self._pages, self.horizon
        while excess > 0:
            counted = pages.get(tick, 0)
            if counted > excess:
                pages[tick] = counted - excess
                break
            excess -= counted
            if counted and tick != self.now:
                del pages[tick]
            elif counted:
                pages[tick] = 0
            tick += 1
        self.horizon = tick
        self.num_pages = num_pages

    def use(self, node: Node) -> tuple[int, int]:
        """A request uses the path to a node, and a tick begins. Returns how many pages LRU would not have had, and how
        many it would have had that are not on the device any more. What a lease holds, LRU has too."""
        pages, before = self._pages, self.now
        if not pages[before]:
            del pages[before]
        self.now = now = before + 1
        added = won = lost = 0
        above: Node | None = node
        while above is not None:
            count, tick = len(above.run) // ID_BYTES, above.touched
            above.touched = now
            added += count
            counted = pages.get(abs(tick), 0)
            if count < counted:
                pages[abs(tick)] = counted - count
                counted = count
            elif counted:
                del pages[abs(tick)]
            self.num_pages -= counted
            if tick < 0:
                lost += counted
            elif counted < count and not above.level:
                won += count - counted
            above = above.parent
        pages[now] = added
        self.num_pages += added
        return won, lost

    def add(self, num_pages: int) -> None:
        """Pages are used now."""
        self._pages[self.now] += num_pages
        self.num_pages += num_pages

    def take(self, tick: int, num_pages: int) -> int:
        """How many of `num_pages` pages that were last used at `tick` LRU would have. They are not counted again."""
        counted = self._pages.get(tick, 0)
        there = min(num_pages, counted)
        self.num_pages -= there
        if there < counted or tick == self.now:
            self._pages[tick] = counted - there
        elif there:
            del self._pages[tick]
        return there


class Guard:
    """Compares the hits of an eviction order with those of LRU on the same requests, and says what the order may evict.

    Net losses protect the pages that were used last. With none, the order is free. With a quarter of its limit it only
    evicts what is in the older half of LRU's time, and at the limit only what LRU evicts, for FIRST_WAIT requests. Then
    the order is tried again. Each trial that fails makes the next wait LONGER times as long, and a gain of CREDIT makes
    it short again.
    """

    def __init__(self) -> None:
        self.bound = LRUBound()
        self.num_cached = 0
        """Pages that the tree has."""
        self.by_use = False
        """Whether LRU decides."""
        self.num_switches = 0
        self.won_pages = self.lost_pages = 0
        """Hits that LRU would not have had, and misses that would have been hits of LRU."""
        self._balance = 0.0
        self._waits = FIRST_WAIT
        self._wait_until = 0
        self._mean = 0.0  # pages of a request
        self._ended = 0

    def used(self, node: Node) -> None:
        """A request uses the path to a node."""
        bound = self.bound
        if bound.num_pages > self.num_cached:
            bound.limit(self.num_cached)
        won, lost = bound.use(node)
        if won or lost:
            self._count(won, lost)
        if self._balance < 0:
            self._balance -= self._balance / FORGIVEN
        if self.by_use and bound.now >= self._wait_until:
            self._switch(by_use=False)

    def protected_age(self) -> int:
        """Leaves that were used fewer ticks ago go last, in order of last use."""
        if self._balance >= 0 and not self.by_use:
            return 0
        part = 1.0 if self.by_use else min(1.0, -self._balance / self._limit) ** 0.5
        return int(part * (self.bound.now - self.bound.horizon))

    def stored(self, leaf: Node) -> None:
        """A new leaf has its pages."""
        leaf.touched = self.bound.now
        self.bound.add(leaf.num_pages)
        self.num_cached += leaf.num_pages

    def returned(self, edge: Node, num_pages: int) -> None:
        """Evicted pages are computed again."""
        lost = self.bound.take(abs(edge.touched), num_pages)
        if lost:
            self._count(0, lost)

    def lengthened(self, node: Node, num_pages: int) -> None:
        """A leaf has got more pages. All of them count as used now."""
        self.num_cached += num_pages
        bound = self.bound
        if node.touched != bound.now:
            num_pages += bound.take(abs(node.touched), node.num_pages - num_pages)
            node.touched = bound.now
        bound.add(num_pages)

    def ended(self, num_pages: int) -> None:
        """A request has ended with so many pages."""
        if self._ended < _MEAN_OVER:
            self._ended += 1
        self._mean += (num_pages - self._mean) / self._ended

    @property
    def _limit(self) -> float:
        """Pages. It grows with the requests, as a loss is a part of all hits."""
        return min(LIMITS[1], LIMITS[0] + LIMIT_GROWS * self.bound.now) * self._mean

    def _count(self, won: int, lost: int) -> None:
        self.won_pages += won
        self.lost_pages += lost
        credit = CREDIT * self._mean
        self._balance = min(credit, self._balance + won - lost)
        if self.by_use:
            return
        if self._balance >= credit:
            self._waits = FIRST_WAIT
        elif self._balance < -self._limit:
            self._wait_until = self.bound.now + self._waits
            self._waits = min(LONGER * self._waits, LONGEST_WAIT)
            self._switch(by_use=True)

    def _switch(self, *, by_use: bool) -> None:
        self.by_use = by_use
        self.num_switches += 1
        logger.info(
            "eviction is %s: %d pages were hit that LRU would not have had, and %d missed that it would have had",
            "by last use for now" if by_use else "by hit density again",
            self.won_pages,
            self.lost_pages,
        )
        self._balance = 0.0
