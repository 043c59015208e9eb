"""Offload: the port through which a cache calls the policies that retain pages and move them between tiers.

The classes here do nothing: the cache uses the device alone and retains nothing. `quire.offload` implements them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from quire.cache.groups import DamagedPages, resume_point
from quire.cache.hold import Holds
from quire.cache.request_kv import Choice, PrefixHit, RequestKV
from quire.cache.room import Room
from quire.cache.running import Lengths, RunningTables
from quire.cache.states import GroupCache
from quire.cache.tenants import Tenants
from quire.memory.allocator import BaseTokenToKVPoolAllocator, GroupFrames
from quire.memory.residency import Residency
from quire.plan.budget import MemoryPlan
from quire.prefix.match import Evicted, Match
from quire.prefix.node import Lease
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier
from quire.tiers.transfer import Transfer


class Cached(NamedTuple):
    """What a request has cached: its pages, a view of its row; those from number `new` on have entered the tree now."""

    kv: RequestKV
    pages: Ids
    new: int


@dataclass(frozen=True, slots=True)
class CacheParts:
    """The parts of one cache that its offload uses. The cache owns them.

    `free` receives pages that have left the tree. `sweep` frees flushed pages that nothing holds any more.
    `reclaim(frames of each group, cause, pages that get them)` does not wait; if it raises OutOfPages, it has
    evicted nothing. `changed` reports that requests that did not fit may fit now. `step_seconds` is the duration of a
    step, 0 while no request runs. `audits` are more sources of slices for `quire.cache.audit.Auditor`; `withheld`
    return ids that are neither free nor those of pages. `committed` are called with what requests have cached together.
    `flushed` are called with a namespace, or None for all, before its pages leave the tree. `moved` are called with a
    group, frames that ascend and the frames that they are copied to: behind all steps that were launched, before the
    next one. Without any of these no frame moves. `fixed` return frames of a group that must not move now. `resized`
    are called with the plan of another size (`quire.cache.resizing`). `tenants` say who holds what, or None."""

    plan: MemoryPlan
    frames: Residency
    pages: BaseTokenToKVPoolAllocator
    groups: tuple[GroupCache, ...]
    rooms: tuple[Room, ...]
    tree: RadixCache
    rows: RunningTables
    damaged: DamagedPages
    holds: Holds
    seconds: Callable[[], float]
    free: Callable[[Ids], None]
    sweep: Callable[[], None]
    reclaim: Callable[..., None]
    changed: Callable[[], None]
    step_seconds: Callable[[], float]
    audits: list[Callable[[Any], Iterator[str]]] = field(default_factory=list)
    withheld: list[Callable[[], Sequence[int]]] = field(default_factory=list)
    flushed: list[Callable[[Namespace | None], None]] = field(default_factory=list)
    moved: list[Callable[[int, Ids, Ids], None]] = field(default_factory=list)
    fixed: list[Callable[[int], Sequence[Ids]]] = field(default_factory=list)
    resized: list[Callable[[MemoryPlan], None]] = field(default_factory=list)
    committed: list[Callable[[Sequence[Cached]], None]] = field(default_factory=list)
    tenants: Tenants | None = None


class RetentionPort:
    """Pages that callers retain; here none. *Soft* retentions end before a running request is refused a page."""

    def num_soft(self, group: GroupCache | None = None) -> int:
        """Pages on the device that only soft retentions protect; or frames of a group that is read in part."""
        return 0

    def num_soft_of(self, match: Match, num_pages: int, group: GroupCache | None = None) -> int:
        """Those among `num_soft` that a request on the first `num_pages` pages of a match would itself hold."""
        return 0

    @property
    def num_pinned(self) -> int:
        """Pages that stay retained even if requests lack room."""
        return 0

    def expire(self) -> int:
        """End the expired retentions, and return their number. O(1) where there are none."""
        return 0

    def soft_by_tenant(self, match: Match, num_pages: int) -> Lengths:
        """The pages of `num_soft` without those of `num_soft_of`, by tenant."""
        return np.zeros(1, dtype=np.int64)

    def give_way(self, wanted: Sequence[int], num_new: int, lack: int = 0) -> bool:
        """End soft retentions until `wanted` frames per group and `num_new` page ids are available, and `lack` pages
        more than now, or until ending more would not help. Returns whether any ended."""
        return False


class Offload:
    """Moves bytes between the device and other tiers. In this class, pages that leave the device are deleted. `hosts`
    are the frames of each group on the host, if there are any."""

    hosts: Sequence[GroupFrames[Any]] = ()

    def __init__(self, parts: CacheParts) -> None:
        self.retention = RetentionPort()
        self._parts = parts
        self._partial = tuple(group for group in parts.groups if not group.reach.whole)

    def choose(self, found: Match, limit: int) -> Choice:
        """How many of the first `limit` pages of a match to reuse, and which to load. Changes nothing."""
        limit = self._parts.damaged.before(found.pages[:limit])
        if not self._partial:
            return Choice(limit)
        return Choice(*resume_point(self._partial, found.pages[:limit]))

    def bring(self, lease: Lease, hit: PrefixHit, label: str) -> list[Transfer]:
        """Start to load what a leased hit lacks on the device, and return the transfers that a step has to wait for. If
        it raises OutOfPages, nothing has changed, and the caller still owns the lease."""
        return []

    def begun(self, kv: RequestKV, hit: PrefixHit, *, resumed: bool) -> None:
        """A request has begun, after `bring` of the same hit."""

    def committed(self, kv: RequestKV, pages: Ids, start: int, new: int) -> None:
        """`pages`, a view of a request's row, are cached: new from `start` on, and the request's own from `new` on."""

    def finished(self, kv: RequestKV, pages: Ids, *, returns: bool) -> None:
        """A request ends; `pages`, a view of its row, stay cached. With `returns` it will run again."""

    @property
    def is_moving(self) -> bool:
        """Whether frames of the device are in transfers."""
        return False

    def make_room(self, *, waits: bool) -> bool:
        """Release a hold on pages; if the caller `waits`, else wait a little for a transfer. False: neither can be."""
        return False

    def evict(self, num_pages: int, num_ids: int, cause: str) -> Evicted:
        """Evict up to `num_pages` pages without holds from the device, and free the ids of pages on other tiers until
        `num_ids` are free. Returns all pages that leave the tree."""
        removed = self._parts.tree.evict(num_pages, cause)
        self._parts.free(removed)
        return Evicted(removed, 0)

    def freed(self, pages: Ids) -> Ids:
        """These pages have left the cache, or never entered it. Returns those whose ids can be allocated again now."""
        return pages

    @property
    def num_read_ids(self) -> int:
        """At most so many ids cannot be allocated again at once when their pages are evicted."""
        return 0


class OffloadFactory:
    """Makes the offload of a cache; by default one for a cache with the device alone."""

    @property
    def below(self) -> tuple[Tier, ...]:
        """Tiers below the device that have frames."""
        return ()

    def num_pages(self, plan: MemoryPlan) -> int:
        """Additional page ids, for pages that are only on other tiers."""
        return 0

    def make(self, parts: CacheParts) -> Offload:
        """The offload of the cache with these parts."""
        return Offload(parts)


NO_OFFLOAD = OffloadFactory()
