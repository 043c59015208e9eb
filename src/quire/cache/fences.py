"""Fences: pages, leases and frames that requests give up wait here for the launched steps that may touch them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.cache.groups import NO_PAGES, GroupRelease
from quire.prefix.node import Lease
from quire.spec.ids import Ids

_NEWEST = 0.2  # weight of the newest step in `step_seconds`


@dataclass(frozen=True, slots=True)
class Retired:
    """What a request gives up: private pages, the lease on the pages before them, and its share of single groups."""

    pages: Ids = field(default_factory=lambda: NO_PAGES)
    lease: Lease | None = None
    released: tuple[GroupRelease, ...] = ()


class Fences:
    """Steps in flight, in launch order, and what waits for them.

    Any open step may read or write what is retired. So that waits until all steps that are open at that moment have
    closed. A waiting lease protects its pages, so evicted pages can be reused at once.

    `step_seconds` is the recent duration of a step from launch to settling, a moving average.
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
        """What has been retired and cannot be reused yet."""
        return tuple(retired for _, retired in self._waiting)

    def open(self) -> int:
        """A step is launched. `close` the returned fence when it has settled."""
        fence = self._next
        self._next += 1
        self._open[fence] = self._seconds()
        return fence

    def retire(self, retired: Retired) -> bool:
        """True: it can be reused at once. False: `close` will return it."""
        if not self._open:
            return True
        self._waiting.append((max(self._open), retired))
        return False

    def close(self, fence: int) -> list[Retired]:
        """A step has settled. Returns what can be reused now."""
        took = self._seconds() - self._open.pop(fence)
        self.step_seconds += (took - self.step_seconds) * (_NEWEST if self.step_seconds else 1.0)
        oldest = min(self._open, default=self._next)
        ready = []
        while self._waiting and self._waiting[0][0] < oldest:
            ready.append(self._waiting.popleft()[1])
        return ready
