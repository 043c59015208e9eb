"""Whether what is on the host of a prompt is loaded or computed again: asked while it waits, decided when it begins."""

from __future__ import annotations

from functools import partial

from quire.cache.prefix_hit import Choice
from quire.offload.tiering import Tiering
from quire.prefix.match import Match
from quire.tiers.break_even import BreakEven
from quire.tiers.transfer import Lane


def choose(tiers: Tiering, found: Match, limit: int, page_size: int) -> Choice:
    """How many of the first `limit` pages of a match to reuse: all that can be resumed behind, from the host too where
    that is worth it, or else what the device has. Changes nothing."""
    choice = _chosen(tiers, found, limit, page_size)
    choice.stands = partial(_stands, tiers, tiers.num_dropped, choice.weighed, bool(choice.host_pages))
    return choice


def decide(even: BreakEven, choice: Choice) -> None:
    """A request has begun with this choice: it counts."""
    if choice.weighed is not None and even.decide(Lane.LOAD, *choice.weighed) and not choice.host_pages:
        even.untried(Lane.LOAD)


def _chosen(tiers: Tiering, found: Match, limit: int, page_size: int) -> Choice:
    pages = found.pages[:limit]
    limit = tiers.damaged.before(pages)
    pages = pages[:limit]
    here = min(found.num_here, limit)
    near, limited = tiers.resume_point(pages[:here], below=False)
    if near == limit:
        return Choice(near, limited)
    far, limited_far = tiers.resume_point(pages, below=True)
    if far <= near:
        return Choice(near, limited_far)
    loads = list(map(len, tiers.missing(pages[:far])))
    if tiers.is_too_much(loads):
        return Choice(near, "", declined_pages=far - near)
    num_bytes = sum(count * size for count, size in zip(loads, tiers.settings.record_bytes, strict=True))
    weighed = None if tiers.settings.always or not num_bytes else ((far - near) * page_size, num_bytes)
    if weighed is not None and not _pays(tiers, *weighed):
        return Choice(near, "", declined_pages=far - near, weighed=weighed)
    return Choice(far, limited_far, loads, far - near, tiers.num_fetched(pages[near:far]), weighed=weighed)


def _stands(tiers: Tiering, num_dropped: int, weighed: tuple[int, int] | None, loads: bool) -> bool:
    """Whether to load what was chosen can be done still and is still worth it, or still not."""
    return tiers.num_dropped == num_dropped and (weighed is None or _pays(tiers, *weighed) == loads)


def _pays(tiers: Tiering, tokens: int, num_bytes: int) -> bool:
    return tiers.break_even.pays(Lane.LOAD, tokens, num_bytes, tiers.mover.in_flight(Lane.LOAD))
