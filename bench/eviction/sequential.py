"""replay_in_order: one request at a time through the tree of the cache, without scheduler, steps and tokens.

Each request is matched, leased and evicted for as in the engine: first for its prompt, then for its output, which both
become cached. It ends before the next one begins, as in `HitBounds`. So policies are compared with each other and with
the optimum by what they evict alone, much faster than in `Replay`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from bench.eviction.paged_trace import PagedTrace

from quire.prefix.node import Lease, User
from quire.prefix.policy import EvictionPolicy
from quire.prefix.radix_cache import RadixCache
from quire.sim.hit_bounds import PagedRequest
from quire.spec.ending import Ending
from quire.spec.ids import Ids

REMEMBERED = 4  # times the pool: evicted pages that the tree remembers, as in `KVCache`
TAILS: tuple[Ids, ...] = tuple(np.array([ending], dtype=np.int32) for ending in range(3))
"""In place of the last token of an output, which trees of page ids do not have."""


@dataclass(frozen=True, slots=True, eq=False)
class SequentialResult:
    """Hits of one replay. A request that the pool can never hold is refused, and hits nothing."""

    hit_tokens: npt.NDArray[np.int64]
    """Of each request."""
    refused: npt.NDArray[np.bool_]
    """Of each request."""
    evicted_pages: int
    cpu_seconds: float
    """CPU time of the whole replay, which is that of the tree and the policy."""

    def hit_rate(self, trace: PagedTrace) -> float:
        """Share of the trace's prompt tokens that were found cached."""
        return float(self.hit_tokens.sum() / trace.prompt_tokens.sum())

    def saved_share(self, trace: PagedTrace, growth: float) -> float:
        """Share of the work of all prompts that hits have saved, if a token costs more by `growth` for each one before
        it, in parts of what the first one costs."""
        saved, all_work = (tokens + growth * tokens * tokens / 2 for tokens in (self.hit_tokens, trace.prompt_tokens))
        return float(saved.sum() / all_work.sum())


class SequentialReplay:
    """A tree of page ids and a pool of `pool_pages` pages of `page_size` tokens, empty at first.

    `now`, which the tree reads as its clock, is the arrival of the current request in seconds. Endings of outputs are
    `told`, or their last tokens differ."""

    def __init__(self, pool_pages: int, page_size: int, policy: EvictionPolicy, *, told: bool = False) -> None:
        self._told = told
        self.now = 0.0
        self.evicted_pages = 0
        self.tree = RadixCache(1, policy, remembered=REMEMBERED * pool_pages, seconds=lambda: self.now)
        self.tree.longest_grown //= page_size
        self._page_size = page_size
        self._pool_pages = pool_pages

    def serve(self, request: PagedRequest[Ids], user: User | None = None) -> int | None:
        """Serve a request, a turn of the `user`, to its end. Returns how many pages it hits; None if the pool can
        never hold it."""
        if request.held_pages > self._pool_pages:
            return None
        self.now = request.arrival
        tree, pages = self.tree, request.pages
        match = tree.match(request.namespace, pages[: request.lookup_pages])
        lease = tree.lease(match, priority=request.priority, user=user)
        self._make_room(-(-request.prompt_tokens // self._page_size) - match.num_pages)
        num_prompt = request.prompt_tokens // request.page_size  # whole pages
        prompt = pages[match.num_pages : num_prompt]
        tree.insert(lease, prompt, prompt)  # the ids of frames do not matter
        self._make_room(request.held_pages - num_prompt)
        output = pages[num_prompt:]
        tree.insert(lease, output, output)
        end(tree, lease, request, self._told)
        tree.release(lease)
        return match.num_pages

    def _make_room(self, num_pages: int) -> None:
        missing = num_pages - (self._pool_pages - self.tree.num_pages)
        if missing > 0:
            self.evicted_pages += len(self.tree.evict(missing))


def replay_in_order(
    trace: PagedTrace,
    pool_tokens: int,
    policy: EvictionPolicy,
    *,
    closes: float = 0.0,
    told: bool = False,
    progress: Callable[[int], None] = lambda ended: None,
) -> SequentialResult:
    """Replay a trace with a new `policy` in a pool of whole pages. Clients close this share of the sessions after the
    last turn. Endings are `told`, as in `SequentialReplay`. `progress` is called with the number of requests that have
    ended, whenever one has."""
    users, last = closed_sessions(trace, closes)
    replay = SequentialReplay(pool_tokens // trace.page_size, trace.page_size, policy, told=told)
    hits = np.zeros(len(trace), dtype=np.int64)
    refused = np.zeros(len(trace), dtype=np.bool_)
    began = time.thread_time()
    for at, request in enumerate(trace):
        found = replay.serve(request, user := users[at])
        if user is not None and at in last:
            replay.tree.end(user)
        refused[at] = found is None
        hits[at] = (found or 0) * trace.page_size
        progress(at + 1)
    return SequentialResult(hits, refused, replay.evicted_pages, time.thread_time() - began)


def end(tree: RadixCache, lease: Lease, request: PagedRequest[Ids], told: bool) -> None:
    """A request has ended. How is told to the policy, or its last token says it."""
    if not told:
        tree.ended(lease, TAILS[request.ending], request.output_tokens)
        return
    memo = tree.ended(lease, TAILS[0], request.output_tokens)
    if memo is not None and request.ending:
        tree.policy.told(memo, Ending.TOOL if request.ending == 2 else Ending.ANSWER)


def closed_sessions(trace: PagedTrace, share: float) -> tuple[Sequence[User | None], set[int]]:
    """Of each request its session, and the last requests of those that are closed: a `share` of all."""
    if not share:
        return [None] * len(trace), set()
    names, which = np.unique(trace.sessions, return_inverse=True)
    users = [User() for _ in names]
    last = dict(zip(which.tolist(), range(len(trace)), strict=True))
    closed = np.flatnonzero(np.random.default_rng(0).random(len(names)) < share)
    return [users[each] for each in which.tolist()], {last[each] for each in closed.tolist()}
