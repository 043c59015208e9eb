"""Room: what goes so that running requests find pages and frames, and in which order.

    what is free                              first
    what callers asked to keep, softly        until enough could be evicted; the lowest priority first
    what is on its way between tiers          is waited for: it can be evicted when it has arrived
    what requests that read ahead keep        is taken, from who began last first, and they read no further
    what is cached                            whole pages where pages are short, or frames of a group that has all of
                                              them; where another group is short, its frames go, and the pages stay

Whoever cannot be served is told before any of the cached pages goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.cache.running import Rows
from quire.errors import OutOfPages
from quire.prefix.node import Lease
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.tiers.transfer import Transfer

if TYPE_CHECKING:
    from quire.cache.kv_cache import KVCache


class Room:
    """Makes room in one cache, of which it is a part. `wanted` are frames by group, `num_new` new pages."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def make(self, rows: Rows, num_new: int, cause: str) -> None:
        """Evict until these rows can take so many new pages. Raises OutOfPages before anything is evicted."""
        cache = self._cache
        cache.retention.expire()
        wanted = [group.wanted(rows, num_new) for group in cache.groups]
        while self._short(wanted, num_new) and (self._give_up(wanted, num_new) or self._wait() or self.take_back()):
            wanted = [group.wanted(rows, num_new) for group in cache.groups]
        self._free_up(wanted, num_new, cause)

    def bring(self, lease: Lease, namespace: Namespace, pages: Ids, cause: str) -> list[Transfer]:
        """Start to load what the device lacks of a leased path; what has to arrive before a step may read it. Raises
        OutOfPages, with the lease released, where there is no room."""
        cache, tiers = self._cache, self._cache.tiers
        assert tiers is not None
        missing = tiers.missing(pages)
        if any(map(len, missing)):
            held = tiers.hold(pages)
            try:
                wanted = list(map(len, missing))
                while self._short(wanted, 0) and (self._give_up(wanted, 0) or self.take_back()):
                    pass
                self._free_up(wanted, 0, cause)
                if tiers.load(namespace, lease.node, pages, missing) is None:
                    waits = "loads that are on their way take all there is room for"
                    raise OutOfPages(group="loads", wanted=sum(wanted), free=0, held_by=waits)
            except OutOfPages:
                cache.tree.release(lease)
                raise
            finally:
                tiers.let_go(held)
        return tiers.loads_of(pages)

    def take_back(self) -> bool:
        """Take from one who reads ahead what it keeps; whether there was anything."""
        cache = self._cache
        if cache.prefetcher is None or not cache.prefetcher.give_way():
            return False
        cache.sweep()  # before it could be evicted to the host, and from there stored: it may have been flushed
        return True

    # -- inside

    def _short(self, wanted: Sequence[int], num_new: int) -> OutOfPages | None:
        """What is short even if everything evictable goes."""
        cache = self._cache
        short = [(g.name, n, g.num_free, g.num_evictable) for g, n in zip(cache.groups, wanted, strict=True)]
        tree = cache.tree
        short.append(("pages", num_new, cache.pages.num_free_pages, tree.num_evictable + tree.num_below))
        for name, n, have, more in short:
            if n > have + more:
                holders = f"{len(cache.live_requests)} running requests hold the rest"
                if cache.retention.num_pinned:
                    holders += f", but for {cache.retention.num_pinned} pages that callers have pinned"
                return OutOfPages(group=name, wanted=n, free=have, evictable=more, held_by=holders)
        return None

    def _give_up(self, wanted: Sequence[int], num_new: int) -> bool:
        """Let go of what is kept softly until nothing is short, or nothing would help; whether anything was."""
        cache, retention = self._cache, self._cache.retention
        if not len(retention):
            return False
        before = retention.num_let_go
        short = [n - g.num_free - g.num_evictable for g, n in zip(cache.groups, wanted, strict=True)]
        whole = [n for n, group in zip(short, cache.groups, strict=True) if group.reach.whole]
        pages = num_new - cache.pages.num_free_pages - cache.tree.num_evictable - cache.tree.num_below
        retention.give_up(max(pages, *whole, 0))
        for group, n in zip(cache.groups, short, strict=True):
            if not group.reach.whole and n > 0:
                retention.give_up_frames(group.index, n)
        return retention.num_let_go > before

    def _wait(self) -> bool:
        """Wait a little for what is on its way between tiers; False where nothing is."""
        tiers = self._cache.tiers
        if tiers is None or not tiers.wait():
            return False
        self._cache.settle_moves()
        return True

    def _free_up(self, wanted: Sequence[int], num_new: int, cause: str) -> None:
        """Evict until so much is free. Raises OutOfPages before that."""
        cache = self._cache
        error = self._short(wanted, num_new)
        if error is not None:
            raise error
        whole = [n - g.num_free for g, n in zip(cache.groups, wanted, strict=True) if g.reach.whole]
        missing = max(num_new - cache.pages.num_free_pages, *whole, 0)
        if missing > 0 and whole and cache.tiers is not None:
            evicted = cache.tree.evict_device(missing, cause, cache.tiers.keeps)
            cache._evicted_pages += len(evicted.removed)
            cache._evictions += 1
            cache.tiers.left_device(evicted.moved)
            cache._give_back(evicted.removed)
        elif missing > 0:
            cache.evict(missing, cause)
        # What has left the device keeps its id while it has a copy below.
        while cache.tiers is not None and cache.pages.num_free_pages < num_new:
            if not cache.tiers.evict_host(num_new - cache.pages.num_free_pages):
                break
        for group, n in zip(cache.groups, wanted, strict=True):
            if n > group.num_free:
                group.evict(n - group.num_free)
