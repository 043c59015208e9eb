"""Offload: what a cache asks of the policies that keep pages, and that move them between the device and what is below.

A cache calls this port and knows nothing of hosts, stores and policies. `NO_OFFLOAD` is a cache that has the device
alone and keeps nothing for callers; the others are in `quire.offload`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.cache.damaged import DamagedPages
from quire.cache.groups import GroupCache
from quire.cache.hold import Holds
from quire.cache.prefix_hit import Choice, PrefixHit
from quire.cache.request_kv import RequestKV
from quire.cache.resuming import resume_point
from quire.cache.snapshot import Law
from quire.memory.allocator import BaseTokenToKVPoolAllocator
from quire.memory.residency import Residency
from quire.plan.budget import MemoryPlan
from quire.prefix.match import Evicted, Match
from quire.prefix.node import Lease
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Ids, Tier
from quire.tiers.transfer import Transfer


@dataclass(frozen=True, slots=True)
class CacheParts:
    """The parts of one cache that an offload uses. The cache owns them.

    `give_back` takes pages that have left the tree. `sweep` gives back what was flushed and is held no longer.
    `reclaim` frees so many frames of each group, for `cause`, without waiting, or raises OutOfPages, with nothing
    evicted. `changed` says that something came back: requests that did not fit may fit now. `step_seconds` is what a
    step takes while any request runs, else 0. What an offload keeps is in `holds`. It adds to `laws` what the audit
    checks beside its own.
    """

    plan: MemoryPlan
    frames: Residency
    pages: BaseTokenToKVPoolAllocator
    groups: tuple[GroupCache, ...]
    tree: RadixCache
    damaged: DamagedPages
    holds: Holds
    seconds: Callable[[], float]
    give_back: Callable[[Ids], None]
    sweep: Callable[[], None]
    reclaim: Callable[[Sequence[int], str], None]
    changed: Callable[[], None]
    step_seconds: Callable[[], float]
    laws: list[Law] = field(default_factory=list)


class Kept(Protocol):
    """What is kept for callers. *Soft* is what goes before a running request is refused a page."""

    @property
    def num_soft(self) -> int:
        """Pages on the device that soft keeping alone keeps from being evicted."""

    def num_soft_of(self, match: Match, num_pages: int) -> int:
        """Which of `num_soft` a request would hold itself that begins on the first `num_pages` pages of a match."""

    def num_soft_frames(self, group: int) -> int:
        """The same of frames of a group that is read in part."""

    def num_soft_frames_of(self, group: int, pages: Ids) -> int:
        """Which of these a request would hold itself that begins behind `pages`."""

    @property
    def num_pinned(self) -> int:
        """Pages that are not let go of for requests."""

    def expire(self) -> int:
        """Let go of what has been kept for its time. O(1) if that is nothing."""

    def give_way(self, wanted: Sequence[int], num_new: int) -> bool:
        """Let go of what is kept softly until `wanted` frames, by group, and `num_new` page ids could be had, or
        nothing would help; whether anything was let go of."""


class Offload(Protocol):
    """What has bytes moved between the device and other tiers, and what is `kept` for callers."""

    @property
    def kept(self) -> Kept: ...

    def choose(self, found: Match, limit: int) -> Choice:
        """How many of the first `limit` pages of a match to reuse, and what of them to load. Changes nothing."""

    def bring(self, lease: Lease, hit: PrefixHit, label: str) -> list[Transfer]:
        """Start to load what the device lacks of a leased hit; returns what has to arrive before a step may read it.
        Raises OutOfPages where there is no room, and then nothing has changed: the lease is the caller's still."""

    def begun(self, kv: RequestKV, hit: PrefixHit, *, resumed: bool) -> None:
        """A request has begun on a hit that was brought."""

    def committed(self, kv: RequestKV, pages: Ids, start: int, new: int) -> None:
        """Pages of a request are cached, a view of its row: those from `start` on since now, and those from `new` on
        are its own."""

    def finished(self, kv: RequestKV, pages: Ids, *, returns: bool) -> None:
        """A request that ends has left these pages, a view of its row, cached. `returns` where it will go on, and will
        want them."""

    def make_room(self, *, waits: bool) -> bool:
        """Let go of something that it keeps from being evicted, or, where the caller `waits`, wait a little for bytes
        on their way; False where there is nothing of the kind."""

    def evict(self, num_pages: int, num_ids: int, cause: str) -> Evicted:
        """Take up to `num_pages` pages that nobody holds off the device, and give up ids of pages that are elsewhere
        until `num_ids` are free. All that has left the tree has been given back."""

    def forgotten(self, pages: Ids) -> None:
        """These pages have left the cache, or never were in it."""


class OffloadFactory(Protocol):
    """Makes the offload of a cache. `below` are the tiers that frames have beside the device."""

    @property
    def below(self) -> tuple[Tier, ...]: ...

    def num_pages(self, plan: MemoryPlan) -> int:
        """Ids for pages that are on other tiers only."""

    def make(self, parts: CacheParts) -> Offload:
        """The offload of the cache that has these parts."""


class NoOffload:
    """The device alone: what leaves it is forgotten."""

    def __init__(self, parts: CacheParts) -> None:
        self.kept: Kept = NothingKept()
        self._tree = parts.tree
        self._give_back = parts.give_back
        self._partial = tuple(group for group in parts.groups if not group.reach.whole)

    def choose(self, found: Match, limit: int) -> Choice:
        """All that every group can resume behind."""
        return Choice(*resume_point(self._partial, found.pages[:limit]))

    def bring(self, lease: Lease, hit: PrefixHit, label: str) -> list[Transfer]:
        """Nothing has to come."""
        return []

    def begun(self, kv: RequestKV, hit: PrefixHit, *, resumed: bool) -> None:
        """Nobody has to know."""

    def committed(self, kv: RequestKV, pages: Ids, start: int, new: int) -> None:
        """Nothing is copied."""

    def finished(self, kv: RequestKV, pages: Ids, *, returns: bool) -> None:
        """Nothing is copied."""

    def make_room(self, *, waits: bool) -> bool:
        """Nothing is kept, and nothing moves."""
        return False

    def evict(self, num_pages: int, num_ids: int, cause: str) -> Evicted:
        """What leaves the device has no place elsewhere."""
        removed = self._tree.evict(num_pages, cause)
        self._give_back(removed)
        return Evicted(removed, 0)

    def forgotten(self, pages: Ids) -> None:
        """There are no copies."""


class NothingKept:
    """Callers cannot keep anything."""

    num_soft = num_pinned = 0

    def num_soft_of(self, match: Match, num_pages: int) -> int:
        """None."""
        return 0

    def num_soft_frames(self, group: int) -> int:
        """None."""
        return 0

    def num_soft_frames_of(self, group: int, pages: Ids) -> int:
        """None."""
        return 0

    def expire(self) -> int:
        """None."""
        return 0

    def give_way(self, wanted: Sequence[int], num_new: int) -> bool:
        """There is nothing to let go of."""
        return False


class _DeviceOnly:
    below: tuple[Tier, ...] = ()

    def num_pages(self, plan: MemoryPlan) -> int:
        """None."""
        return 0

    def make(self, parts: CacheParts) -> Offload:
        """Nothing is moved, nothing is kept."""
        return NoOffload(parts)


NO_OFFLOAD: OffloadFactory = _DeviceOnly()
