"""Tiered: the offload of a cache with a host below its device, and perhaps a store below that."""

from __future__ import annotations

from functools import partial

from quire.cache.offload import CacheParts
from quire.cache.prefix_hit import Choice, PrefixHit
from quire.cache.request_kv import RequestKV
from quire.errors import OutOfPages
from quire.offload.laws import tier_laws
from quire.offload.prefetcher import Prefetcher
from quire.offload.retention import Retention
from quire.offload.tier_settings import TierSettings
from quire.offload.tiering import Tiering
from quire.offload.worth_loading import choose, decide
from quire.prefix.match import Evicted, Match
from quire.prefix.node import Lease
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.tiers.transfer import Transfer


class Tiered:
    """The port of `quire.cache.offload`. `tiers` says what moves, `prefetcher` what is read from the store while
    requests wait, `kept` what callers have asked to keep; schedulers ask `ahead`."""

    def __init__(self, parts: CacheParts, settings: TierSettings, retain_share: float) -> None:
        self.tiers = Tiering(settings, parts)
        self.kept = Retention(parts, retain_share, self.tiers.hosts)
        self.ahead = self.prefetcher = Prefetcher(self.tiers, parts, self.kept)
        self._parts = parts
        self._has_whole = any(group.reach.whole for group in parts.groups)
        parts.laws.append(partial(tier_laws, self.tiers, self.prefetcher))

    def choose(self, found: Match, limit: int) -> Choice:
        """All that can be resumed behind, from the host too where that is worth it."""
        return choose(self.tiers, found, limit, self._parts.plan.page_size)

    def bring(self, lease: Lease, hit: PrefixHit, namespace: Namespace, label: str) -> list[Transfer]:
        """Load what the device lacks of a hit, into room that is made for it."""
        tiers, pages = self.tiers, hit.pages
        missing = tiers.missing(pages)
        if any(map(len, missing)):
            hold = tiers.hold(pages, label)
            try:
                wanted = list(map(len, missing))
                self._parts.reclaim(wanted, label)
                if tiers.load(namespace, lease.node, pages, missing) is None:
                    waits = "loads that are on their way take all there is room for"
                    raise OutOfPages(group="loads", wanted=sum(wanted), free=0, held_by=waits)
            finally:
                self._parts.holds.release(hold)
        return tiers.loads_of(pages)

    def begun(self, kv: RequestKV, hit: PrefixHit, *, resumed: bool) -> None:
        """Only now what was chosen counts."""
        decide(self.tiers.break_even, hit.choice)
        self.tiers.begun(kv, hit, resumed=resumed)

    def committed(self, kv: RequestKV, pages: Ids, start: int, new: int) -> None:
        """New pages are copied where the policy says so."""
        self.tiers.committed(kv, pages, start, new)

    def finished(self, kv: RequestKV, pages: Ids, *, returns: bool) -> None:
        """What it leaves is copied where the policy says so, and owed to the store."""
        self.tiers.finished(kv, pages.copy(), returns=returns)

    def make_room(self, *, waits: bool) -> bool:
        """Wait for what is on its way, which can be evicted when it has arrived; or take from one who reads ahead what
        it keeps."""
        if waits and self.tiers.wait():
            self.ahead.settle_moves()
            return True
        return self.ahead.take_back_prefetched()

    def evict(self, num_pages: int, num_ids: int, cause: str) -> Evicted:
        """What has a copy below stays in the tree, and keeps its id until that is wanted."""
        parts, tiers = self._parts, self.tiers
        if self._has_whole:
            evicted = parts.tree.demote(num_pages, cause, tiers.keeps, tiers.left_device)
        else:
            evicted = Evicted(parts.tree.evict(num_pages, cause), 0)
        parts.give_back(evicted.removed)
        while parts.pages.num_free_pages < num_ids:
            if not tiers.evict_host(num_ids - parts.pages.num_free_pages):
                break
        return evicted

    def abandon(self, namespace: Namespace | None) -> None:
        """What is on its way of a namespace, or at all, counts for nothing when it arrives."""
        self.tiers.abandon(namespace)
        self.prefetcher.abandon(namespace)

    def forgotten(self, pages: Ids) -> None:
        """Their copies go."""
        self.tiers.forgotten(pages)
