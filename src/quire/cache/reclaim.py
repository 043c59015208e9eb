"""Reclaim: what goes so that running requests find pages and frames, and in which order.

    what is free                              first
    what callers asked to keep, softly        until enough could be evicted; the lowest priority first
    what is on its way between tiers          is waited for: it can be evicted when it has arrived
    what requests that read ahead keep        is taken, from who began last first, and they read no further
    what is cached                            whole pages where pages are short, or frames of a group that has all of
                                              them; where another group is short, its frames go, and the pages stay

Whoever cannot be served is told before any of the cached pages goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.cache.groups import GroupCache
from quire.cache.hold import Holds
from quire.cache.offload import Offload
from quire.cache.running import Rows
from quire.cache.statistics import CacheCounters
from quire.errors import OutOfPages
from quire.memory.allocator import BaseTokenToKVPoolAllocator
from quire.prefix.radix_cache import RadixCache


class Reclaim:
    """Makes room in one cache. `wanted` are frames by group, `num_new` new pages. `live` are the requests that run,
    `holds` what else is kept."""

    def __init__(
        self,
        groups: Sequence[GroupCache],
        pages: BaseTokenToKVPoolAllocator,
        tree: RadixCache,
        offload: Offload,
        counters: CacheCounters,
        live: Mapping[int, object],
        holds: Holds,
    ) -> None:
        self._groups = groups
        self._pages = pages
        self._tree = tree
        self._offload = offload
        self._counters = counters
        self._live = live
        self._holds = holds

    def for_rows(self, rows: Rows, num_new: int, cause: str) -> None:
        """Evict until these rows can take so many new pages. Raises OutOfPages before anything is evicted."""
        self._offload.kept.expire()
        self._until(lambda: [group.wanted(rows, num_new) for group in self._groups], num_new, cause, waits=True)

    def frames(self, wanted: Sequence[int], cause: str) -> None:
        """Evict until so many frames are free in each group, without waiting for what is on its way. Raises OutOfPages
        before anything is evicted."""
        self._until(lambda: wanted, 0, cause, waits=False)

    # -- inside

    def _until(self, ask: Callable[[], Sequence[int]], num_new: int, cause: str, *, waits: bool) -> None:
        """Let go of what is kept until all that is asked for, which may change by that, can be evicted; and evict."""
        wanted = ask()
        while self._short(wanted, num_new) and (
            self._offload.kept.give_way(wanted, num_new) or self._offload.make_room(waits=waits)
        ):
            wanted = ask()
        self._evict(wanted, num_new, cause)

    def _short(self, wanted: Sequence[int], num_new: int) -> OutOfPages | None:
        """What is short even if everything evictable goes."""
        short = [(g.name, n, g.num_free, g.num_evictable) for g, n in zip(self._groups, wanted, strict=True)]
        tree = self._tree
        short.append(("pages", num_new, self._pages.num_free_pages, tree.num_evictable + tree.num_below))
        for name, n, have, more in short:
            if n > have + more:
                holders = f"{len(self._live)} running requests hold the rest"
                if held := self._holds.summary():
                    holders += f", beside {held}"
                if num_pinned := self._offload.kept.num_pinned:
                    holders += f", but for {num_pinned} pages that callers have pinned"
                return OutOfPages(group=name, wanted=n, free=have, evictable=more, held_by=holders)
        return None

    def _evict(self, wanted: Sequence[int], num_new: int, cause: str) -> None:
        """Evict until so much is free. Raises OutOfPages before that."""
        error = self._short(wanted, num_new)
        if error is not None:
            raise error
        whole = [n - g.num_free for g, n in zip(self._groups, wanted, strict=True) if g.reach.whole]
        missing = max(num_new - self._pages.num_free_pages, *whole, 0)
        if missing > 0:
            evicted = self._offload.evict(missing, num_new, cause)
            self._counters.evicted(len(evicted.removed))
        for group, n in zip(self._groups, wanted, strict=True):
            if n > group.num_free:
                group.evict(n - group.num_free)
