"""Whether one more request fits: what it claims in each group beside what running requests were promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.cache.groups import GroupCache
from quire.cache.prefix_hit import PrefixHit
from quire.cache.retention import Retention
from quire.cache.running import Lengths, Rows


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


def group_claim(
    group: GroupCache,
    kept: Retention,
    hit: PrefixHit,
    num_pages: int,
    rows: Rows,
    have: Lengths,
    reached: Lengths,
    reserve: int,
) -> Claim:
    """What a request of `num_pages` pages that begins on `hit` claims of a group, beside `rows`, which have `have[i]`
    pages, were promised `reached[i]`, and are to have `reserve` more each. What is `kept` softly can be had too."""
    if group.reach.whole:
        soft, own = kept.num_soft, kept.num_soft_of(hit.match, hit.num_pages)
    else:
        soft, own = kept.num_soft_frames(group.index), kept.num_soft_frames_of(group.index, hit.pages)
    return Claim(
        group.name,
        group.num_free + group.num_evictable + soft,
        group.needs(num_pages, hit.num_pages) + (hit.choice.loads[group.index] if hit.choice.loads else 0),
        group.owed(rows, have, reached),
        group.reserve(len(rows) * reserve),
        group.would_pin(hit.pages, hit.num_evictable) + own,
    )


def pages_claim(
    available: int, kept: Retention, hit: PrefixHit, num_pages: int, have: Lengths, reached: Lengths, reserve: int
) -> Claim:
    """The same of the pages themselves."""
    owed = int((reached - have).sum())
    pinned = hit.num_evictable + kept.num_soft_of(hit.match, hit.num_pages)
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
