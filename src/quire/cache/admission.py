"""Admission: whether one more request fits, beside what running requests were promised, and whether what it was matched
with still holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.cache.explain import explain_prompt
from quire.cache.groups import GroupCache
from quire.cache.offload import CacheParts, RetentionPort
from quire.cache.prefix_hit import PrefixHit
from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths, Rows
from quire.cache.running_tables import RunningTables
from quire.observe.explain import Explanation
from quire.spec.ids import Bools, Ids
from quire.spec.rank import Rank

NO_ROWS: Rows = np.empty(0, dtype=np.intp)


@dataclass(frozen=True, slots=True)
class Claim:
    """Of what `name` counts, `available` could be had now. `pinned` of these the request's own prefix keeps, `owed` are
    promised to running requests; it takes `own` itself, and `spare` stay for the next tokens of those that run."""

    name: str
    available: int
    own: int
    owed: int
    spare: int
    pinned: int


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
        divergence = self._tree.divergence(hit.match, tokens)
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
        have = -(-self._rows.table.allocated[rows] // self._size)
        retention = self._retention
        claims = [group_claim(group, retention, hit, num_pages, rows, have, reached, reserve) for group in self._groups]
        claims.append(pages_claim(self.num_available_pages, retention, hit, num_pages, have, reached, reserve))
        return first_refusal(claims, len(rows))


def group_claim(
    group: GroupCache,
    retention: RetentionPort,
    hit: PrefixHit,
    num_pages: int,
    rows: Rows,
    have: Lengths,
    reached: Lengths,
    reserve: int,
) -> Claim:
    """What a request of `num_pages` pages that begins on `hit` claims of a group, beside `rows`, which have `have[i]`
    pages, were promised `reached[i]`, and are to have `reserve` more each. What is retained softly can be had too."""
    if group.reach.whole:
        soft, own = retention.num_soft, retention.num_soft_of(hit.match, hit.num_pages)
    else:
        soft, own = retention.num_soft_frames(group.index), retention.num_soft_frames_of(group.index, hit.pages)
    return Claim(
        group.name,
        group.num_free + group.num_evictable + soft,
        group.needs(num_pages, hit.num_pages) + (hit.choice.loads[group.index] if hit.choice.loads else 0),
        group.owed(rows, have, reached),
        group.reserve(len(rows) * reserve),
        group.would_pin(hit.pages, hit.num_evictable) + own,
    )


def pages_claim(
    available: int,
    retention: RetentionPort,
    hit: PrefixHit,
    num_pages: int,
    have: Lengths,
    reached: Lengths,
    reserve: int,
) -> Claim:
    """The same of the pages themselves."""
    owed = int((reached - have).sum())
    pinned = hit.num_evictable + retention.num_soft_of(hit.match, hit.num_pages)
    return Claim("all groups", available, num_pages - hit.num_pages, owed, len(have) * reserve, pinned)


def first_refusal(claims: Sequence[Claim], num_running: int) -> str:
    """The first claim that cannot be met, in words; "" where all can."""
    for claim in claims:
        left = claim.available - claim.pinned - claim.owed
        if claim.own + claim.spare > left:
            return (
                f"needs {claim.own} pages of '{claim.name}' and {claim.spare} in reserve; {max(0, left)} are "
                f"available, {num_running} running requests hold the rest"
            )
    return ""
