"""Admission: whether one more request fits, beside what running requests were promised, and whether what it was matched
with still holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quire.cache.explain import explain_prompt
from quire.cache.offload import CacheParts, RetentionPort
from quire.cache.prefix_hit import PrefixHit
from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths, Rows
from quire.cache.running_tables import RunningTables
from quire.observe.explain import Explanation
from quire.prefix.divergence import find_divergence
from quire.spec.ids import Bools, Ids
from quire.spec.rank import Rank

NO_ROWS: Rows = np.empty(0, dtype=np.intp)


class Admission:
    """What a scheduler asks before a request begins or grows. It takes nothing."""

    def __init__(self, parts: CacheParts, rows: RunningTables, retention: RetentionPort) -> None:
        self._pages = parts.pages
        self._tree = parts.tree
        self._groups = parts.groups
        self._seconds = parts.seconds
        self._rows = rows
        self._retention = retention
        self._size = parts.plan.page_size
        self._partial = [group for group in parts.groups if not group.reach.whole]
        self.gives_back_early = bool(self._partial)
        """Whether what settles may set frames free before its request ends."""

    @property
    def num_available_pages(self) -> int:
        """Pages that `extend` could find: free ones, evictable ones, and those that are kept until they are missed."""
        return self._pages.num_free_pages + self._tree.num_evictable + self._retention.num_soft

    @property
    def num_dropped(self) -> int:
        """Frames that cached pages have lost on the device since the start."""
        return sum([group.dropped_frames for group in self._groups])

    def is_current(self, hit: PrefixHit) -> bool:
        """Whether a hit still holds: no edge was cut since, no page lost a frame, and what it would load is worth it as
        before. It may have become longer."""
        is_same = hit.match.version == self._tree.version and hit.num_dropped == self.num_dropped
        return is_same and hit.choice.stands()

    def explain(self, tokens: Ids, hit: PrefixHit) -> Explanation:
        """Why a prompt that hits `hit`, which is current, is cached as far as it is and not further: a cause for every
        token."""
        divergence = find_divergence(self._tree.roots, hit.match, tokens, self._size)
        return explain_prompt(len(tokens), self._size, hit, divergence, self._seconds())

    def frees(self, rows: Rows, num_pages: Lengths) -> Bools:
        """Which of these rows, of which so many whole pages have settled, would set frames free by a commit."""
        found = np.zeros(len(rows), dtype=np.bool_)
        for group in self._partial:
            found |= group.frees(rows, num_pages)
        return found

    def at_once(self, kv: RequestKV, count: int) -> int:
        """How many of `count` tokens, at least one, `extend` may be asked for at once where frames are short of which
        a request gives back what it has passed: the rest fits when these have settled."""
        slack = -self._rows.allocated(kv) % self._size
        passing = [
            g.num_free + g.num_evictable + self._retention.num_soft_frames(g.index)
            for g in self._groups
            if not g.reach.whole and not g.reach.carried
        ]
        return max(1, min(count, slack + min(passing) * self._size)) if passing else count

    def will_leave(self, kv: RequestKV, num_pages: int) -> bool:
        """Whether a running request has still to compute, or to leave for others to begin on, the end of its first
        `num_pages` pages. From now on it means to: another one waits for that prefix."""
        row = self._rows.row_of(kv)
        if not kv.shares:
            return False
        kv.marks.setdefault(num_pages, Rank.USED)
        return num_pages > kv.lease.num_pages or any(group.owes(row, num_pages) for group in self._groups)

    def why_not(
        self, hit: PrefixHit, num_pages: int, rows: Rows = NO_ROWS, reached: Lengths = NO_ROWS, reserve: int = 0
    ) -> str:
        """Why a request of `num_pages` pages that begins on `hit` does not fit now; "" where it does.

        It must fit beside what the running requests in `rows` take until each has `reached[i]` pages, and `reserve`
        pages more for each of them.
        """
        for name, left, own, spare in self._claims(hit, num_pages, rows, reached, reserve):
            if own + spare > left:
                return (
                    f"needs {own} pages of '{name}' and {spare} in reserve; {max(0, left)} are available, {len(rows)} "
                    "running requests hold the rest"
                )
        return ""

    def _claims(
        self, hit: PrefixHit, num_pages: int, rows: Rows, reached: Lengths, reserve: int
    ) -> Iterator[tuple[str, int, int, int]]:
        """Of each group, by its name, and of page ids: how many are `left` of what could be had, but for what the
        request's own prefix keeps and what running requests were promised; how many it takes itself; and how many stay
        for the next tokens of those that run. What is retained softly can be had."""
        retention, have = self._retention, -(-self._rows.table.allocated[rows] // self._size)
        soft_of_hit = retention.num_soft_of(hit.match, hit.num_pages)
        for group in self._groups:
            if group.reach.whole:
                soft, own_soft = retention.num_soft, soft_of_hit
            else:
                soft, own_soft = (
                    retention.num_soft_frames(group.index),
                    retention.num_soft_frames_of(group.index, hit.pages),
                )
            pinned = group.would_pin(hit.pages, hit.num_evictable) + own_soft
            left = group.num_free + group.num_evictable + soft - pinned - group.owed(rows, have, reached)
            loads = hit.choice.loads[group.index] if hit.choice.loads else 0
            yield group.name, left, group.needs(num_pages, hit.num_pages) + loads, group.reserve(len(rows) * reserve)
        left = self.num_available_pages - hit.num_evictable - soft_of_hit - int((reached - have).sum())
        yield "all groups", left, num_pages - hit.num_pages, len(rows) * reserve
