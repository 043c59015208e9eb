"""Offload: what a cache asks of the policies that keep pages, and that move them between the device and what is below.

A cache calls this port and knows nothing of hosts, stores and policies. As the classes are here, a cache has the device
alone and retains nothing for callers; those of `quire.offload` say what else is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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


class RetentionPort:
    """What is retained for callers: here, nothing. *Soft* is what goes before a running request is refused a page."""

    @property
    def num_soft(self) -> int:
        """Pages on the device that soft retentions alone keep from being evicted."""
        return 0

    def num_soft_of(self, match: Match, num_pages: int) -> int:
        """Which of `num_soft` a request would hold itself that begins on the first `num_pages` pages of a match."""
        return 0

    def num_soft_frames(self, group: int) -> int:
        """As `num_soft`, of frames of a group that is read in part."""
        return 0

    def num_soft_frames_of(self, group: int, pages: Ids) -> int:
        """Which of these a request would hold itself that begins behind `pages`."""
        return 0

    @property
    def num_pinned(self) -> int:
        """Pages that are not given up for requests."""
        return 0

    def expire(self) -> int:
        """End what has been retained for its time; returns how many retentions that were. O(1) if it is none."""
        return 0

    def give_way(self, wanted: Sequence[int], num_new: int) -> bool:
        """Give up what is soft until `wanted` frames, by group, and `num_new` page ids could be had, or nothing would
        help; whether anything was given up."""
        return False


class Offload:
    """What has bytes moved between the device and other tiers, and what is retained for callers. Here what leaves the
    device is forgotten."""

    def __init__(self, parts: CacheParts) -> None:
        self.retention = RetentionPort()
        self._parts = parts
        self._partial = tuple(group for group in parts.groups if not group.reach.whole)

    def choose(self, found: Match, limit: int) -> Choice:
        """How many of the first `limit` pages of a match to reuse, and what of them to load. Changes nothing."""
        if not self._partial:
            return Choice(limit)
        return Choice(*resume_point(self._partial, found.pages[:limit]))

    def bring(self, lease: Lease, hit: PrefixHit, label: str) -> list[Transfer]:
        """Start to load what the device lacks of a leased hit; returns what has to arrive before a step may read it.
        Raises OutOfPages where there is no room, and then nothing has changed: the lease is the caller's still."""
        return []

    def begun(self, kv: RequestKV, hit: PrefixHit, *, resumed: bool) -> None:
        """A request has begun on a hit that was brought."""

    def committed(self, kv: RequestKV, pages: Ids, start: int, new: int) -> None:
        """Pages of a request are cached, a view of its row: those from `start` on since now, and those from `new` on
        are its own."""

    def finished(self, kv: RequestKV, pages: Ids, *, returns: bool) -> None:
        """A request that ends has left these pages, a view of its row, cached. `returns` where it will go on, and will
        want them."""

    def make_room(self, *, waits: bool) -> bool:
        """Give up something that it keeps from being evicted, or, where the caller `waits`, wait a little for bytes on
        their way; False where there is nothing of the kind."""
        return False

    def evict(self, num_pages: int, num_ids: int, cause: str) -> Evicted:
        """Take up to `num_pages` pages that nothing holds off the device, and give up ids of pages that are elsewhere
        until `num_ids` are free. All that has left the tree has been given back."""
        removed = self._parts.tree.evict(num_pages, cause)
        self._parts.give_back(removed)
        return Evicted(removed, 0)

    def forgotten(self, pages: Ids) -> None:
        """These pages have left the cache, or never were in it."""


class OffloadFactory:
    """Makes the offload of a cache."""

    @property
    def below(self) -> tuple[Tier, ...]:
        """Tiers that frames have beside the device."""
        return ()

    def num_pages(self, plan: MemoryPlan) -> int:
        """Ids for pages that are on other tiers only."""
        return 0

    def make(self, parts: CacheParts) -> Offload:
        """The offload of the cache that has these parts."""
        return Offload(parts)


NO_OFFLOAD = OffloadFactory()
