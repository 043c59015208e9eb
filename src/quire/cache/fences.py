"""Fences: what requests give up waits here until no launched step can touch it any more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.cache.groups import NO_PAGES, Given
from quire.prefix.node import Lease
from quire.spec.ids import Ids

_NEWEST = 0.2  # of what a step takes, that the newest counts


@dataclass(frozen=True, slots=True)
class Retired:
    """Private pages that nobody needs any more, the lease that kept the pages before them, and what was given up in
    single groups."""

    pages: Ids = field(default_factory=lambda: NO_PAGES)
    lease: Lease | None = None
    given: tuple[Given, ...] = ()


class Fences:
    """Steps in flight, in launch order, and what was retired meanwhile.

    What is retired while steps are open may still be read or written by any of them, so it is handed on when the last
    one that was open at that moment closes. A waiting lease keeps its pages from being evicted, so whatever the tree
    offers for eviction can be reused at once. With no step open, nothing waits.

    `step_seconds` is what a step took of late, from its launch until it had settled.
    """

    step_seconds = 0.0

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._next = 0
        self._open: dict[int, float] = {}  # when each was launched
        self._waiting: deque[tuple[int, Retired]] = deque()  # (newest step open at retirement, what), in order

    @property
    def num_open(self) -> int:
        """Steps in flight."""
        return len(self._open)

    @property
    def waiting(self) -> tuple[Retired, ...]:
        """What was retired and may not be reused yet."""
        return tuple(retired for _, retired in self._waiting)

    def open(self) -> int:
        """A step is being launched; `close` the returned fence when it has settled."""
        fence = self._next
        self._next += 1
        self._open[fence] = self._seconds()
        return fence

    def retire(self, retired: Retired) -> bool:
        """Give something up. True: it may be reused at once. False: `close` will return it."""
        if not self._open:
            return True
        self._waiting.append((max(self._open), retired))
        return False

    def close(self, fence: int) -> list[Retired]:
        """A step has settled; returns what may be reused now."""
        took = self._seconds() - self._open.pop(fence)
        self.step_seconds += (took - self.step_seconds) * (_NEWEST if self.step_seconds else 1.0)
        oldest = min(self._open, default=self._next)
        ready = []
        while self._waiting and self._waiting[0][0] < oldest:
            ready.append(self._waiting.popleft()[1])
        return ready
