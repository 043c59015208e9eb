"""Why a prompt's prefix is cached as far as it is, and not further."""

from __future__ import annotations

from quire.observe.explain import Cause, Explanation, Reason
from quire.prefix.parting import Parting


def explain_prompt(
    num_tokens: int, page_size: int, reused: int, limited_by: str, parting: Parting, now: float
) -> Explanation:
    """The cause of every token of a prompt of `num_tokens` tokens, of which `reused` whole pages are reused.

    `limited_by` names the group that could not resume further on, if one could not.
    """
    reasons: list[Reason] = []
    at = 0

    def until(stop: int, cause: Cause, detail: str = "", by: str = "", ago: float | None = None) -> None:
        nonlocal at
        stop = min(stop, num_tokens)
        if stop > at:
            reasons.append(Reason(cause, at, stop - at, detail, by, ago))
            at = stop

    until(reused * page_size, Cause.HIT)
    if limited_by:
        usable = min(parting.matched, max(0, num_tokens - 1) // page_size)
        until(usable * page_size, Cause.GROUP, f"group '{limited_by}' has dropped what it needs to resume further on")
    until(parting.matched * page_size, Cause.LAST_TOKEN, "a prompt's last token is always computed, with its page")
    for pages, eviction in parting.evicted:
        ago = max(0.0, now - eviction.seconds)
        by = eviction.cause or "a request to evict"
        until(at + pages * page_size, Cause.EVICTED, f"evicted {ago:.1f} s ago for {by}", by, ago)
    if parting.elsewhere is not None:
        namespace, pages = parting.elsewhere
        what = " and ".join(
            f"{name} '{value}'" for name, value in (("adapter", namespace.adapter), ("salt", namespace.salt)) if value
        )
        until(pages * page_size, Cause.NAMESPACE, f"cached for {what or 'requests without adapter and salt'}")
    if parting.common and at == (parting.matched + sum(pages for pages, _ in parting.evicted)) * page_size:
        until(
            at + parting.common,
            Cause.PAGE,
            f"as in a cached page, but only whole pages of {page_size} tokens are reused",
        )
    until(num_tokens, Cause.NEW, f"token {at} is the first that was never seen here")
    return Explanation(num_tokens, tuple(reasons))
