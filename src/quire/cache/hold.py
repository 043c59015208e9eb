"""Hold: pages that stay for a reason, until it is released. Fences: pages that launched steps may still read.

    a path of the tree        a lease on its end: none of its pages is evicted, in any tier
    frames                    of groups whose frames may go before their pages: that tier does not reclaim them

A running request is a hold of its own kind: it has a lease, and private pages in its row. So is the row that a
session keeps between two requests (`quire.cache.sessions`). `Holds` lists and counts these, what waits in `Fences`, and
the holds that `Holds.add` creates.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from quire.cache.groups import NO_PAGES, GroupRelease
from quire.cache.request_kv import RequestKV
from quire.errors import LeaseError
from quire.memory.residency import Residency
from quire.prefix.node import Lease, Node
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Ids, Tier
from quire.spec.rank import Rank

_NEWEST = 0.2  # weight of the newest step in `step_seconds`


class Reason(StrEnum):
    """Why pages are held."""

    BEGIN = "request that begins"
    SAVE = "save"
    LOAD = "load"
    READ_AHEAD = "prompt that is read ahead"
    RETAIN = "retention"
    DAMAGE = "damaged prefix"


REQUEST, SESSION, STEP = "running request", "session", "launched step"
"""What holds pages beside such reasons: steps in flight hold what a request has released."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldFrames:
    """Pages of one group whose frames are held in one tier."""

    group: int
    tier: Tier
    pages: Ids


@dataclass(slots=True, eq=False)
class Hold:
    """Made by `Holds.add`. `lease` holds a path, if any."""

    reason: Reason
    lease: Lease | None
    frames: tuple[HeldFrames, ...] = ()
    released: bool = False

    @property
    def path(self) -> Lease:
        """The lease on the hold's path. Only for a hold with a path."""
        assert self.lease is not None, "this hold has no path"
        return self.lease


@dataclass(frozen=True, slots=True)
class Retired:
    """What a request releases: private pages, the lease on the pages before them, and frames of single groups."""

    pages: Ids = field(default_factory=lambda: NO_PAGES)
    lease: Lease | None = None
    released: tuple[GroupRelease, ...] = ()


class Fences:
    """Steps in flight, in launch order, and what waits until all steps that were open at its release have closed.

    A waiting lease protects its pages, so evicted pages can be reused at once. `step_seconds` is the recent duration of
    a step from launch to settling, a moving average."""

    step_seconds = 0.0

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self.next = 0
        """The fence that the next `open` returns."""
        self._open: dict[int, float] = {}  # when each was launched
        self._waiting: deque[tuple[int, Retired]] = deque()  # (newest open step at the release, item), in order

    @property
    def num_open(self) -> int:
        """Steps in flight."""
        return len(self._open)

    def has_passed(self, fence: int) -> bool:
        """Whether all steps before this fence have settled."""
        return not self._open or min(self._open) >= fence

    @property
    def waiting(self) -> tuple[Retired, ...]:
        """What was released and cannot be reused yet."""
        return tuple([retired for _, retired in self._waiting])

    def open(self) -> int:
        """A step is launched. Call `close` with the returned fence when the step has settled."""
        fence = self.next
        self.next += 1
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
        oldest = min(self._open, default=self.next)
        ready = []
        while self._waiting and self._waiting[0][0] < oldest:
            ready.append(self._waiting.popleft()[1])
        return ready


class Holds:
    """The live holds of one cache, beside its running `requests` and what waits in `fences`."""

    def __init__(self, tree: RadixCache, table: Residency, requests: Mapping[int, RequestKV], fences: Fences) -> None:
        self._tree = tree
        self._table = table
        self._requests = requests
        self.fences = fences
        self._live: dict[Hold, None] = {}

    def add(self, reason: Reason, frames: Sequence[HeldFrames] = (), *, lease: Lease | None = None) -> Hold:
        """Hold these until `release`. The hold owns `lease`. Frames of a retention have a higher rank later."""
        hold = Hold(reason, lease)
        self._live[hold] = None
        self._pin(hold, frames)
        return hold

    def change(self, hold: Hold, frames: Sequence[HeldFrames], *, lease: Lease | None = None) -> None:
        """Hold these frames instead, and the path of `lease`, if given. Frames held before and after stay pinned."""
        before, path = hold.frames, hold.lease
        self._pin(hold, frames)
        self._unpin(before)
        if lease is not None:
            hold.lease = lease
            if path is not None:
                self._tree.release(path)

    def release(self, hold: Hold) -> None:
        """End a hold. Raises LeaseError at the second call."""
        if hold.released:
            raise LeaseError(f"the hold of a {hold.reason} was released twice.")
        hold.released = True
        del self._live[hold]
        self._unpin(hold.frames)
        if hold.lease is not None:
            self._tree.release(hold.lease)

    def held_pages(self) -> dict[str, int]:
        """Cached pages by what holds them: of its path, or without one the frames that it holds, of all groups."""
        counts = Counter[str]()
        for kv in self._requests.values():
            counts[SESSION if kv.is_held else REQUEST] += kv.lease.num_pages
        for retired in self.fences.waiting:
            counts[STEP] += retired.lease.num_pages if retired.lease is not None else 0
        for hold in self._live:
            counts[hold.reason] += hold.lease.num_pages if hold.lease else sum(len(each.pages) for each in hold.frames)
        return dict(counts)

    def leases(self) -> list[Lease]:
        """The leases of running requests, of releases that wait for launched steps, and of live holds."""
        holders: tuple[RequestKV | Retired | Hold, ...] = (*self._requests.values(), *self.fences.waiting, *self._live)
        return [holder.lease for holder in holders if holder.lease is not None]

    def ends(self) -> list[Node]:
        """The node at the end of each of these leases."""
        return [lease.node for lease in self.leases()]

    def readers(self, group: int, tier: Tier) -> Ids:
        """Pages of a group with held frames in a tier, once for each hold; empty if no frame is reclaimed."""
        if not self._table.of(tier, group).reclaims:
            return NO_PAGES
        runs = [each.pages for hold in self._live for each in hold.frames if each.group == group and each.tier is tier]
        return np.concatenate(runs) if runs else NO_PAGES

    def summary(self, num_pinned: int = 0) -> str:
        """What holds pages, in words: requests, holds by reason, launched steps, and `num_pinned` pages of callers."""
        counts = Counter[str](hold.reason for hold in self._live)
        if self.fences.waiting:
            counts[STEP] = self.fences.num_open
        if sessions := sum(kv.is_held for kv in self._requests.values()):
            counts[SESSION] = sessions
        others = ", ".join(f"{count} {reason}{'s' if count > 1 else ''}" for reason, count in counts.items())
        beside = f", beside {others}" if others else ""
        pinned = f", but for {num_pinned} pages that callers have pinned" if num_pinned else ""
        return f"{len(self._requests) - sessions} running requests hold the rest{beside}{pinned}"

    def _pin(self, hold: Hold, frames: Sequence[HeldFrames]) -> None:
        hold.frames = tuple(frames)
        rank = Rank.USED if hold.reason is Reason.RETAIN else Rank.PASSED
        for each in frames:
            self._table.of(each.tier, each.group).pin(each.pages, rank)

    def _unpin(self, frames: Sequence[HeldFrames]) -> None:
        for each in frames:
            self._table.of(each.tier, each.group).unpin(each.pages)
