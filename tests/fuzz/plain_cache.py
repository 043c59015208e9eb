"""PlainCache: what a prefix cache is, with sets and lists only. What is checked is compared with it.

It shares no code with the cache: no tree, no rows, no free lists. A cached page is the name of its last token, and so
of all tokens up to its end; pages are only counted.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from quire.cache.request_kv import RequestKV
from tests.fuzz.names import Names


@dataclass(eq=False, slots=True)
class Sequence:
    """One request: the name of all its tokens, and how many of them are allocated, launched, executed by the device,
    settled, committed. It began with `begun` tokens, and `pinned` of its pages are cached. What a window needs after
    `passed` tokens is all that it still reads."""

    kv: RequestKV
    name: int
    num_tokens: int
    begun: int
    pinned: int
    allocated: int
    launched: int
    executed: int
    settled: int
    committed: int
    passed: int = 0


@dataclass(slots=True)
class Waiting:
    """What was given up and waits for these steps: that many pages, and the pin on a prefix."""

    steps: set[int]
    num_pages: int
    leased: int


class PlainCache:
    """The model. `live` are requests, in the order in which they began, `open` the steps in flight."""

    def __init__(self, names: Names, num_pages: int, page_size: int, *, shares: bool = True) -> None:
        self.names = names
        self.shares = shares
        self.num_pages = num_pages
        self.page_size = page_size
        self.cached: set[int] = set()
        self.live: list[Sequence] = []
        self.open: set[int] = set()
        self.waiting: list[Waiting] = []
        self._to_evict = self._may_evict = 0

    def matched(self, name: int) -> int:
        """Pages of a path that are cached, from the first on."""
        for count, end in enumerate(self.names.ends[name]):
            if end not in self.cached:
                return count
        return len(self.names.ends[name])

    def leases(self) -> list[int]:
        """The prefix that each lease holds, in no order."""
        size, prefix = self.page_size, self.names.prefix
        held = [prefix(s.name, s.pinned * size) for s in self.live]
        return held + [entry.leased for entry in self.waiting if entry.leased]

    def leased(self) -> set[int]:
        """Cached pages that a lease holds."""
        return set().union(*[self.names.ends[name] for name in self.leases()])

    def free(self) -> int:
        """Pages without an owner."""
        size = self.page_size
        private = sum([-(-s.allocated // size) - s.pinned for s in self.live])
        return (
            self.num_pages
            - len(self.cached)
            + self._to_evict
            - private
            - sum([entry.num_pages for entry in self.waiting])
        )

    def evictable(self) -> int:
        """Cached pages that no lease holds."""
        return len(self.cached) - len(self.leased())

    def commit(self, s: Sequence, num_tokens: int) -> int:
        """Returns how many of its pages were duplicates."""
        if not self.shares:
            s.committed = num_tokens
            return 0
        pages = self.names.ends[s.name][s.pinned : num_tokens // self.page_size]
        duplicates = len(self.cached.intersection(pages))
        self.cached.update(pages)
        s.pinned += len(pages)
        s.committed = num_tokens
        self._retire(duplicates, 0)
        return duplicates

    def finish(self, s: Sequence) -> None:
        """The request ends; what it had not cached goes, once no step touches it."""
        self.live.remove(s)
        pages = -(-s.allocated // self.page_size) - s.pinned
        self._retire(pages, self.names.prefix(s.name, s.pinned * self.page_size))

    def close(self, step: int) -> None:
        """A step has settled."""
        self.open.remove(step)
        for entry in self.waiting:
            entry.steps.discard(step)
        self.waiting = [entry for entry in self.waiting if entry.steps]

    def expect_evicted(self, num_pages: int) -> None:
        """So many pages were evicted. Which ones is the policy's business, and is seen when the tree is looked at."""
        self._to_evict += num_pages

    def allow_evicted(self, num_pages: int) -> None:
        """Up to so many pages may have been evicted, for an operation that failed afterwards."""
        self._may_evict = num_pages

    def settle_evictions(self, found: Set[int]) -> None:
        """The tree holds these now: what is missing was evicted, as many as expected, and none that a lease holds."""
        expected, self._to_evict = self._to_evict, 0
        most, self._may_evict = self._may_evict, 0
        if expected or most:
            gone = self.cached - found
            assert expected <= len(gone) <= expected + most, f"{len(gone)} pages were evicted, {expected} had to be"
            assert gone.isdisjoint(self.leased()), "a page was evicted that a lease holds"
            self.cached -= gone

    def _retire(self, num_pages: int, leased: int) -> None:
        if self.open:
            self.waiting.append(Waiting(set(self.open), num_pages, leased))
