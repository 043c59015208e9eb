"""Why a prompt's prefix is cached as far as it is, and not further."""

from __future__ import annotations

from quire.cache.prefix_hit import PrefixHit
from quire.observe.explain import Cause, Explanation, Reason, never_seen
from quire.prefix.divergence import Divergence
from quire.spec.events import Namespace


def explain_prompt(num_tokens: int, page_size: int, hit: PrefixHit, divergence: Divergence, now: float) -> Explanation:
    """The cause of every token of a prompt of `num_tokens` tokens, which hits `hit`."""
    reasons: list[Reason] = []
    at = 0

    def until(stop: int, cause: Cause, detail: str = "", by: str = "", ago: float | None = None) -> None:
        nonlocal at
        stop = min(stop, num_tokens)
        if stop > at:
            reasons.append(Reason(cause, at, stop - at, detail, by, ago))
            at = stop

    choice, limited_by = hit.choice, hit.choice.limited_by
    near = choice.num_pages - choice.host_pages
    until(near * page_size, Cause.HIT)
    until((choice.num_pages - choice.storage_pages) * page_size, Cause.HIT, "from host memory")
    until(choice.num_pages * page_size, Cause.HIT, "from storage")
    if choice.declined_pages:
        until(at + choice.declined_pages * page_size, Cause.SLOWER, "in host memory, and computed sooner than loaded")
    if limited_by:
        usable = min(divergence.matched, max(0, num_tokens - 1) // page_size)
        until(usable * page_size, Cause.GROUP, f"group '{limited_by}' has dropped what it needs to resume further on")
    until(divergence.matched * page_size, Cause.LAST_TOKEN, "a prompt's last token is always computed, with its page")
    for pages, eviction in divergence.evicted:
        ago = max(0.0, now - eviction.seconds)
        by = eviction.cause or "a request to evict"
        until(at + pages * page_size, Cause.EVICTED, f"evicted {ago:.1f} s ago for {by}", by, ago)
    until(
        at + divergence.common,
        Cause.PAGE,
        f"seen, but not as a page: only whole pages of {page_size} tokens are reused",
    )
    if divergence.elsewhere is not None:
        namespace, pages = divergence.elsewhere
        until(pages * page_size, Cause.NAMESPACE, f"cached for requests {_with(namespace)}")
    return Explanation(num_tokens, (*reasons, *never_seen(at, num_tokens)))


def _with(namespace: Namespace) -> str:
    """A namespace in words. A salt is a secret between a client and the server, so it is not named."""
    adapter = f"adapter '{namespace.adapter}'" if namespace.adapter else ""
    salt = "a salt of their own" if namespace.salt else ""
    return f"with {' and '.join(filter(None, (adapter, salt)))}" if adapter or salt else "without adapter and salt"
