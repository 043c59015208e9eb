"""What the best possible cache could hit on a trace: with room for everything, and with the room there is.

Both take one request at a time, in the order of the trace, each done before the next one comes. Prompts and outputs
become cached, in whole pages; of a prompt at most all but its last token is found.

For requests that run side by side neither is strictly a bound, though it is close to one. Those hold memory together
and cannot use what the other has not written yet, so they hit less. But another order than the trace's may hit more: a
scheduler that puts off a request until the one that writes its prefix is done, say.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from quire.errors import InvalidInput
from quire.sim.page_runs import PageRuns, PageUse
from quire.sim.trace_request import Trace

_NEVER = -1


@dataclass(frozen=True, slots=True)
class IdealHits:
    """What a cache hits on a trace if it never has to forget."""

    prompt_tokens: int
    """Of the requests that run: those whose client leaves while they wait look nothing up."""
    hit_tokens: int
    working_set_tokens: int
    """Different whole pages of all prompts and outputs: what a cache would hold at the end."""

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def ideal_hits(trace: Trace | PageRuns, page_size: int) -> IdealHits:
    """The hits of a cache without limits. Given the `PageRuns` of the trace, it does not build them again."""
    runs = _runs(trace, page_size)
    return IdealHits(
        prompt_tokens=runs.prompt_tokens,
        hit_tokens=sum(use.hit_pages for use in runs.uses) * page_size,
        working_set_tokens=runs.num_pages * page_size,
    )


def optimal_hit_tokens(trace: Trace | PageRuns, page_size: int, pool_tokens: int) -> int:
    """The most prompt tokens that any policy could hit in a pool of `pool_tokens`, knowing the future.

    Why this is the optimum. A page that is used twice is worth keeping in between if the second use looks it up (the
    other uses write it anyway), and is then worth one page. While a request is served its own pages are in the pool, so
    of the pages that others left at most the rest of the pool is kept. That makes it a choice of as many intervals as
    possible, with so many at a time; going through time and giving up, whenever there are too many, the interval that
    ends last is best, because what it would still be in the way of includes what any other choice would be in the way
    of (Belady). Pages that are never looked up again are not kept at all.

    Why the tree does not change it. A page is of use only with all pages before it. Where a page is looked up, those
    are too, at the same time; so the last interval before that use ends together for all of them, and theirs began no
    earlier than the page's own. Give up the deepest page first among intervals that end together, and a page that is
    kept until it is looked up has everything before it: the best choice without the tree's rule can be made so that it
    obeys the rule. How ties are broken does not change how many pages are kept, so the count need not care.

    Runs stand for pages, and go page by page. A request that the pool cannot hold is refused, and touches nothing.
    Costs O(uses * log(uses)) once the runs are built.
    """
    runs = _runs(trace, page_size)
    pool_pages = pool_tokens // page_size
    uses = [use for use in runs.uses if use.held_pages <= pool_pages]
    future = _next_lookups(uses, len(runs.runs))
    kept = [0] * len(runs.runs)
    furthest: list[tuple[int, int]] = []  # (-request that looks it up, run); where nothing is kept of a run, it is old
    num_kept, hits = 0, 0
    for use, upcoming in zip(uses, future, strict=True):
        for run in use.runs():
            hits += kept[run.number]
            num_kept -= kept[run.number]
            kept[run.number] = 0
        while (excess := num_kept - (pool_pages - use.held_pages)) > 0:
            _, number = furthest[0]
            if not kept[number]:
                heappop(furthest)
                continue
            dropped = min(kept[number], excess)
            kept[number] -= dropped
            num_kept -= dropped
        for run, lookup in zip(use.runs(), upcoming, strict=True):
            if lookup != _NEVER:
                kept[run.number] = run.num_pages
                num_kept += run.num_pages
                heappush(furthest, (-lookup, run.number))
    return hits * page_size


def _next_lookups(uses: list[PageUse], num_runs: int) -> list[list[int]]:
    """For each request and each run it uses, deepest first: which request uses the run next, if that looks it up."""
    upcoming = [_NEVER] * num_runs
    found = []
    for now in range(len(uses) - 1, -1, -1):
        use = uses[now]
        found.append([upcoming[run.number] for run in use.runs()])
        for run in use.runs():
            upcoming[run.number] = now if run.end <= use.lookup_pages else _NEVER
    found.reverse()
    return found


def _runs(trace: Trace | PageRuns, page_size: int) -> PageRuns:
    if not isinstance(trace, PageRuns):
        return PageRuns(trace, page_size)
    if trace.page_size != page_size:
        raise InvalidInput(
            f"these runs are of pages of {trace.page_size} tokens, not {page_size}.",
            fix="build them for this page size.",
        )
    return trace
