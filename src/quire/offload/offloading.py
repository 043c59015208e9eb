"""Offload policies of a cache: `KVCache(plan, offload=Offloads(tiers, retain_share=0.25))`. Flushes of all its tiers.

No prompt matches flushed pages. On device and host they are free at once, or when the running requests that hold them
end. In the store, records are deleted after pending writes. Pages in flight are dropped when they arrive, and pages
that running requests still compute are never shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.cache.groups import NO_PAGES, resume_point
from quire.cache.hold import Reason
from quire.cache.offload import CacheParts, Offload, OffloadFactory
from quire.cache.request_kv import Choice, PrefixHit, RequestKV
from quire.errors import OutOfPages, StoreError
from quire.memory.residency import State
from quire.offload.audit import tier_faults
from quire.offload.deletion import Flushed, Stored
from quire.offload.host_groups import needed_frames
from quire.offload.prefetcher import Prefetcher
from quire.offload.retention import RETAIN_SHARE, Retention
from quire.offload.tier_settings import TierSettings
from quire.offload.tiering import Tiering
from quire.plan.budget import MemoryPlan
from quire.prefix.hashing import layout_identity
from quire.prefix.match import Evicted, Match
from quire.prefix.node import Lease
from quire.prefix.reach import reach_of
from quire.scheduler.prefetching import NOTHING_TO_READ_AHEAD, ReadAhead
from quire.settings.fields import WritePolicy
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier
from quire.tiers.transfer import Lane, Transfer


class Offloading(Offload):
    """Retention on the device alone, without `tiers`. Schedulers ask `ahead`."""

    ahead: ReadAhead[Any] = NOTHING_TO_READ_AHEAD
    tiers: Tiering | None = None
    prefetcher: Prefetcher | None = None

    def __init__(self, parts: CacheParts, retention: Retention) -> None:
        super().__init__(parts)
        self.retention: Retention = retention

    def flush(self, namespace: Namespace | None) -> Flushed:
        """Delete the cached pages and retentions of a namespace, or of all (None). The store deletes later."""
        if self.tiers is not None:
            self.tiers.delete_stored(namespace)
        return self._delete(namespace)

    def flushed(self, done: Flushed, namespace: Namespace | None, *, waits: bool) -> Flushed | None:
        """The result `done` with the state in the store. None if the caller `waits` and the state may change soon.
        Raises StoreError if the store has not hidden the records: other engines still find them."""
        if self.tiers is None or not self.tiers.settings.stores:
            return done
        state, is_tried = self.tiers.deletion.flushed(namespace)
        if waits and (is_tried or state is Stored.HELD):
            return None
        if state is Stored.HELD:
            raise StoreError(
                "what was flushed is deleted here and not in storage, which does not answer. This engine does not "
                "look at it, and goes on trying; others find it, and so does this one after a restart.",
                fix="look at the store, and flush again when it answers.",
            )
        return replace(done, storage=state)

    def change_model(self, model_identity: bytes) -> Flushed:
        """Delete all cached pages, and compute keys for another model, or other weights of the same model, from now on.
        Call it after the weights change and before a step is launched. The store keeps records of the old weights for
        engines that still have them; this cache does not look them up any more."""
        done, fingerprints = self._delete(None), [group.layout.fingerprint() for group in self._parts.plan.groups]
        self._parts.tree.names.rename(layout_identity(model_identity, fingerprints))
        return replace(done, storage=self.stored)

    @property
    def stored(self) -> Stored:
        """The state of records, while none is deleted."""
        return Stored.KEPT if self.tiers is not None and self.tiers.settings.stores else Stored.NONE

    def _delete(self, namespace: Namespace | None) -> Flushed:
        parts, tree = self._parts, self._parts.tree
        num_retentions = self.retention.release_all(namespace)
        for on_flush in parts.flushed:
            on_flush(namespace)
        for kv in parts.rows.live.values():
            kv.shares = kv.shares and namespace not in (None, kv.namespace)
        self._cancel(namespace)
        flushed = [tree.flush(space) for space in list(tree.roots) if namespace in (None, space)]
        pages = np.concatenate([NO_PAGES, *(pages for pages, _ in flushed)])
        parts.free(pages)
        if namespace is None:
            tree.evicted.clear()
            tree.names.cleared()
        parts.changed()
        size, num_held = parts.plan.page_size, sum(num_held for _, num_held in flushed)
        return Flushed(flushed_tokens=len(pages) * size, held_tokens=num_held * size, num_retentions=num_retentions)

    def _cancel(self, namespace: Namespace | None) -> None:
        """Drop the pages of transfers in flight, of a namespace or all (None), when they arrive."""


class Tiered(Offloading):
    """Offload to a host, and to a store if there is one."""

    def __init__(self, parts: CacheParts, settings: TierSettings, retain_share: float) -> None:
        self.tiers: Tiering = Tiering(settings, parts)
        self.hosts = self.tiers.hosts
        super().__init__(parts, Retention(parts, retain_share, self.tiers.hosts))
        self.prefetcher: Prefetcher = Prefetcher(self.tiers, parts)
        self.ahead = self.prefetcher
        self._page_size = parts.plan.page_size
        self._write = settings.write
        parts.audits.append(lambda auditor: tier_faults(self.tiers, self.prefetcher, auditor))
        parts.withheld.append(self._withheld)

    # -- the pages that a request begins on

    def choose(self, found: Match, limit: int) -> Choice:
        """The most pages after which a request can resume, with host copies if loading them is worth it."""
        choice, tiers = self._choose(found, limit), self.tiers
        num_dropped, weighed, loads = tiers.num_dropped, choice.weighed, bool(choice.host_pages)
        choice.stands = lambda: (  # the pages are still there, and the decision to load is still the same
            tiers.num_dropped == num_dropped and (weighed is None or self._pays(*weighed) == loads)
        )
        return choice

    def _choose(self, found: Match, limit: int) -> Choice:
        tiers, settings, pages = self.tiers, self.tiers.settings, found.pages[:limit]
        limit = tiers.damaged.before(pages)
        pages = pages[:limit]
        near, limited = resume_point(self._partial, pages[: min(found.num_here, limit)])
        if near == limit:
            return Choice(near, limited)
        far, limited_far = resume_point(self._partial, pages, tiers.hosts)
        if far <= near:
            return Choice(near, limited_far)
        loads = list(map(len, tiers.missing(pages[:far])))
        if tiers.is_too_much(loads):
            return Choice(near, "", declined_pages=far - near)
        num_bytes = tiers.copied_bytes(loads)
        weighed = None if settings.always or not num_bytes else ((far - near) * self._page_size, num_bytes)
        if weighed is not None and not self._pays(*weighed):
            return Choice(near, "", declined_pages=far - near, weighed=weighed)
        num_fetched = int(np.count_nonzero(tiers.on_host.has(pages[near:far], State.FETCHED)))
        return Choice(far, limited_far, loads, far - near, num_fetched, weighed=weighed)

    def _pays(self, tokens: int, num_bytes: int) -> bool:
        queued = self.tiers.mover.in_flight(Lane.LOAD)
        return self.tiers.break_even.pays(Lane.LOAD, tokens, num_bytes, queued)

    def bring(self, lease: Lease, hit: PrefixHit, label: str) -> list[Transfer]:
        tiers, parts, pages = self.tiers, self._parts, hit.pages
        missing = tiers.missing(pages)
        if any(map(len, missing)):
            hold = parts.holds.add(Reason.BEGIN, frames=needed_frames(self._partial, pages))
            try:
                wanted = list(map(len, missing))
                parts.reclaim(wanted, label, missing)
                if tiers.load(lease.node, pages, missing) is None:
                    waits = "loads that are on their way take all there is room for"
                    raise OutOfPages(group="loads", wanted=sum(wanted), free=0, held_by=waits)
            finally:
                parts.holds.release(hold)
        return tiers.loads_of(pages)

    def begun(self, kv: RequestKV, hit: PrefixHit, *, resumed: bool) -> None:
        tiers, choice, pages = self.tiers, hit.choice, hit.pages
        even = tiers.break_even
        if choice.weighed is not None and even.decide(Lane.LOAD, *choice.weighed) and not choice.host_pages:
            even.untried(Lane.LOAD)
        if not resumed:
            tiers.counters.host_hit_tokens += kv.use.num_host_tokens
            tiers.counters.storage_hit_tokens += kv.use.num_storage_tokens
            tiers.counters.peer_hit_tokens += kv.use.num_peer_tokens
            tiers.counters.declined_tokens += choice.declined_pages * self._page_size
        tiers.on_host.unmark(pages, State.FETCHED)
        if self._write is WritePolicy.SELECTIVE:
            tiers.save(kv.lease.node, pages, ends=(len(pages),), label=kv.label)

    # -- what it leaves

    def committed(self, kv: RequestKV, pages: Ids, start: int, new: int) -> None:
        if new > start:
            self.tiers.check_records(kv.lease.node, pages)
            kv.loads += self.tiers.loads_of(pages[start:new])
            self.tiers.damaged.mend(pages[start:new])
        if self._write is not WritePolicy.SELECTIVE:
            self.tiers.save(kv.lease.node, pages, ends=tuple(kv.marks), label=kv.label)

    def finished(self, kv: RequestKV, pages: Ids, *, returns: bool) -> None:
        if returns or self._write is not WritePolicy.SELECTIVE:
            self.tiers.save(kv.lease.node, pages, ends=(*kv.marks, len(pages)), label=kv.label)
        self.tiers.archiver.archive(kv.lease.node)

    # -- room

    @property
    def is_moving(self) -> bool:
        return bool(self.tiers.moving)

    def make_room(self, *, waits: bool) -> bool:
        if waits and self.tiers.wait():
            self.ahead.settle_moves()
            return True
        return self.ahead.release_prefetched()

    def evict(self, num_pages: int, num_ids: int, cause: str) -> Evicted:
        """Pages with host copies stay in the tree, and keep their ids until other pages need the ids."""
        parts, tiers = self._parts, self.tiers
        if len(self._partial) < len(parts.groups):
            write_back = tiers.write_back if self._write is WritePolicy.BACK else None
            evicted = parts.tree.demote(num_pages, cause, write_back, tiers.leave_device)
        else:
            evicted = Evicted(parts.tree.evict(num_pages, cause), 0)
        parts.free(evicted.removed)
        while parts.pages.num_free_pages < num_ids:
            if not tiers.evict_host(num_ids - parts.pages.num_free_pages, cause):
                break
        return evicted

    def _withheld(self) -> list[int]:
        hosts = self.tiers.hosts
        return [page for host in hosts for page in host.withheld(self.prefetcher.host_frames(host.index))]

    def _cancel(self, namespace: Namespace | None) -> None:
        self.tiers.cancel(namespace)
        self.prefetcher.cancel(namespace)

    def freed(self, pages: Ids) -> Ids:
        return self.tiers.removed(pages)

    @property
    def num_read_ids(self) -> int:
        return self.tiers.num_read_ids


@dataclass(frozen=True, slots=True)
class Offloads(OffloadFactory):
    """Makes the offload of a cache with `tiers`, if any. Callers may retain `retain_share` of the plan's pages."""

    tiers: TierSettings | None = None
    retain_share: float = RETAIN_SHARE

    @property
    def below(self) -> tuple[Tier, ...]:
        return (Tier.HOST, Tier.STORAGE) if self.tiers is not None else ()

    def num_pages(self, plan: MemoryPlan) -> int:
        if self.tiers is None:
            return 0
        for index in plan.groups_on_host:
            return self.tiers.host_frames[index] - plan.num_pages
        frames = zip(self.tiers.host_frames, plan.groups, strict=True)
        whole = [count for count, group in frames if reach_of(group.reach, plan.page_size).whole]
        return max(whole or self.tiers.host_frames)

    def make(self, parts: CacheParts) -> Offloading:
        if self.tiers is None:
            return Offloading(parts, Retention(parts, self.retain_share))
        return Tiered(parts, self.tiers, self.retain_share)


def offload_of(cache: KVCache) -> Offloading:
    """The offload of a cache made with `Offloads`."""
    assert isinstance(cache.offload, Offloading), "this cache was made without Offloads"
    return cache.offload
