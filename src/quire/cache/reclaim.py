"""Reclaim: makes room for running requests, in this order.

free pages and frames
soft retentions           end, the lowest priority first, until enough is evictable
transfers                 are waited for: their pages are evictable when they have arrived
prompts read ahead        are abandoned, the newest first
cached pages              are evicted where page ids or frames of a whole group are short
frames of other groups    are reclaimed where these are short; their pages stay cached
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.cache.offload import CacheParts, Offload
from quire.cache.running import Rows
from quire.cache.statistics import CacheCounters
from quire.errors import OutOfPages


class Reclaim:
    """Makes room in one cache: `wanted` frames by group, `num_new` page ids. `live` are the running requests.

    Raises OutOfPages before it evicts anything.
    """

    def __init__(
        self, parts: CacheParts, offload: Offload, counters: CacheCounters, live: Mapping[int, object]
    ) -> None:
        self._parts = parts
        self._offload = offload
        self._counters = counters
        self._live = live

    def for_rows(self, rows: Rows, num_new: int, cause: str) -> None:
        """Evict until these rows can take `num_new` pages."""
        self._offload.retention.expire()
        self._until(lambda: [g.wanted(rows, num_new) for g in self._parts.groups], num_new, cause, waits=True)

    def frames(self, wanted: Sequence[int], cause: str) -> None:
        """Evict until each group has `wanted[i]` free frames. Does not wait for transfers."""
        self._until(lambda: wanted, 0, cause, waits=False)

    def _until(self, ask: Callable[[], Sequence[int]], num_new: int, cause: str, *, waits: bool) -> None:
        """Release holds until `ask()`, which that may change, is evictable; then evict."""
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
        """The refusal where evicting everything would not do."""
        parts, tree = self._parts, self._parts.tree
        found = [(g.name, n, g.num_free, g.num_evictable) for g, n in zip(parts.groups, wanted, strict=True)]
        found.append(("pages", num_new, parts.pages.num_free_pages, tree.num_evictable + tree.num_below))
        for name, n, have, more in found:
            if n > have + more:
                holders = f"{len(self._live)} running requests hold the rest"
                if held := parts.holds.summary():
                    holders += f", beside {held}"
                if parts.fences.waiting:
                    num_open = parts.fences.num_open
                    holders += f", beside {num_open} launched step{'s' if num_open > 1 else ''}"
                if num_pinned := self._offload.retention.num_pinned:
                    holders += f", but for {num_pinned} pages that callers have pinned"
                return OutOfPages(group=name, wanted=n, free=have, evictable=more, held_by=holders)
        return None
