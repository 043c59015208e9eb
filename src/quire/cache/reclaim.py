"""Reclaim: what goes so that running requests find pages and frames, and in which order.

    what is free                              first
    what callers asked to keep, softly        until enough could be evicted; the lowest priority first
    what is on its way between tiers          is waited for: it can be evicted when it has arrived
    what requests that read ahead keep        is taken, from the last that began, and it reads no further
    what is cached                            whole pages where pages are short, or frames of a group that has all of
                                              them; where another group is short, its frames go, and the pages stay

What cannot be served is refused before any of the cached pages goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.cache.offload import CacheParts, Offload
from quire.cache.running import Rows
from quire.cache.statistics import CacheCounters
from quire.errors import OutOfPages


class Reclaim:
    """Makes room in one cache. `wanted` are frames by group, `num_new` new pages. `live` are the requests that run.

    Raises OutOfPages before anything cached is evicted.
    """

    def __init__(
        self, parts: CacheParts, offload: Offload, counters: CacheCounters, live: Mapping[int, object]
    ) -> None:
        self._parts = parts
        self._offload = offload
        self._counters = counters
        self._live = live

    def for_rows(self, rows: Rows, num_new: int, cause: str) -> None:
        """Evict until these rows can take so many new pages."""
        self._offload.retention.expire()
        self._until(lambda: [g.wanted(rows, num_new) for g in self._parts.groups], num_new, cause, waits=True)

    def frames(self, wanted: Sequence[int], cause: str) -> None:
        """Evict until so many frames are free in each group, without waiting for what is on its way."""
        self._until(lambda: wanted, 0, cause, waits=False)

    # -- inside

    def _until(self, ask: Callable[[], Sequence[int]], num_new: int, cause: str, *, waits: bool) -> None:
        """Give up what is kept until all that is asked for, which may change by that, can be evicted; and evict."""
        wanted = ask()
        while (refusal := self._short(wanted, num_new)) is not None:
            if not (self._offload.retention.give_way(wanted, num_new) or self._offload.make_room(waits=waits)):
                raise refusal
            wanted = ask()
        short = [(group, n) for group, n in zip(self._parts.groups, wanted, strict=True) if n > group.num_free]
        whole = [n - group.num_free for group, n in short if group.reach.whole]
        missing = max(num_new - self._parts.pages.num_free_pages, *whole, 0)
        if missing > 0:
            self._counters.evicted(len(self._offload.evict(missing, num_new, cause).removed))
        for group, n in short:
            if n > group.num_free:
                group.evict(n - group.num_free)

    def _short(self, wanted: Sequence[int], num_new: int) -> OutOfPages | None:
        """What is short even if everything evictable goes."""
        parts, tree = self._parts, self._parts.tree
        found = [(g.name, n, g.num_free, g.num_evictable) for g, n in zip(parts.groups, wanted, strict=True)]
        found.append(("pages", num_new, parts.pages.num_free_pages, tree.num_evictable + tree.num_below))
        for name, n, have, more in found:
            if n > have + more:
                holders = f"{len(self._live)} running requests hold the rest"
                if held := parts.holds.summary():
                    holders += f", beside {held}"
                if num_pinned := self._offload.retention.num_pinned:
                    holders += f", but for {num_pinned} pages that callers have pinned"
                return OutOfPages(group=name, wanted=n, free=have, evictable=more, held_by=holders)
        return None
