"""replay_pinned: requests side by side through the tree of the cache, each of which pins its path while it generates.

A request begins at its arrival, or once those that run leave room for it. It ends after a second for every 50 tokens of
its output. So which requests run when depends on no policy, and the optimum for the same times is known. Pages that are
not full take no room.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from bench.eviction.paged_trace import PagedTrace
from bench.eviction.sequential import REMEMBERED, SequentialResult, closed_sessions
from bench.eviction.sequential import end as end_request

from quire.prefix.node import Lease
from quire.prefix.policy import EvictionPolicy
from quire.prefix.radix_cache import RadixCache
from quire.sim.hit_bounds import NEVER, PagedRequest, PageNode, next_lookups
from quire.spec.ids import Ids

TOKENS_PER_S = 50.0


@dataclass(slots=True)
class RunningQueue:
    """Requests that run, by the time of their end. `now` moves on with those that begin and end."""

    now: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    """Of each that runs: its end, and its number."""

    def begin(self, number: int, output_tokens: int) -> None:
        """A request begins now."""
        heappush(self.ends, (self.now + output_tokens / TOKENS_PER_S, number))

    def end(self) -> int:
        """The number of the next one to end."""
        at, number = heappop(self.ends)
        self.now = max(self.now, at)
        return number


def replay_pinned(
    trace: PagedTrace,
    pool_tokens: int,
    policy: EvictionPolicy,
    *,
    closes: float = 0.0,
    told: bool = False,
    begun: Callable[[int], None] = lambda number: None,
) -> SequentialResult:
    """Replay a trace with a new `policy` in a pool of whole pages. Clients close this share of the sessions. Endings of
    outputs are `told`, or their last tokens differ. `begun` is called with the number of each request that begins."""
    pool = pool_tokens // trace.page_size
    users, last = closed_sessions(trace, closes)
    running = RunningQueue()
    tree = RadixCache(1, policy, remembered=REMEMBERED * pool, seconds=lambda: running.now)
    tree.longest_grown //= trace.page_size
    leases: dict[int, tuple[Lease, PagedRequest[Ids]]] = {}
    hits, refused = np.zeros(len(trace), dtype=np.int64), np.zeros(len(trace), dtype=np.bool_)
    evicted = 0
    began = time.thread_time()

    def end() -> None:
        number = running.end()
        lease, request = leases.pop(number)
        end_request(tree, lease, request, told)
        tree.release(lease)
        if (user := users[number]) is not None and number in last:
            tree.end(user)

    for number, request in enumerate(trace):
        if request.held_pages > pool:
            refused[number] = True
            continue
        while running.ends and running.ends[0][0] <= max(running.now, request.arrival):
            end()
        running.now = max(running.now, request.arrival)
        begun(number)
        looked_up = request.pages[: request.lookup_pages]
        while True:
            match = tree.match(request.namespace, looked_up)
            pin = tree.pin_path(match, match.num_pages)
            missing = len(request.pages) - match.num_pages
            if missing <= pool - tree.num_protected:
                break
            tree.release(pin)
            end()
        lease = tree.lease(tree.match(request.namespace, looked_up), user=users[number])
        tree.release(pin)
        evicted += len(tree.evict(max(0, missing + tree.num_pages - pool)))
        rest = request.pages[match.num_pages :]
        tree.insert(lease, rest, rest)
        hits[number] = match.num_pages * trace.page_size
        leases[number] = lease, request
        running.begin(number, request.output_tokens)
    return SequentialResult(hits, refused, evicted, time.thread_time() - began)


def optimal_pinned(trace: PagedTrace, pool_tokens: int) -> int:
    """Tokens that the optimum hits at the same times: what runs is kept, and of the rest what is looked up last goes.

    As in `HitBounds.optimal_hits`, a node is a run of pages that are always used together."""
    pool = pool_tokens // trace.page_size
    uses = [
        (use, request) for use, request in zip(trace.bounds().uses, trace, strict=True) if request.held_pages <= pool
    ]
    upcoming = next_lookups([use for use, _ in uses])
    running = RunningQueue()
    pins: Counter[PageNode] = Counter()
    lookups: dict[PageNode, int] = {}
    furthest: list[tuple[int, int, PageNode]] = []
    num_kept = num_pinned = hits = 0

    def end() -> None:
        nonlocal num_kept, num_pinned
        for node in uses[running.end()][0].nodes():
            pins[node] -= 1
            if pins[node]:
                continue
            num_pinned -= len(node.keys)
            if lookups[node] == NEVER:
                num_kept -= node.kept
                node.kept = 0
            else:
                heappush(furthest, (-lookups[node], -node.end, node))

    for number, (use, request) in enumerate(uses):
        while running.ends and running.ends[0][0] <= max(running.now, request.arrival):
            end()
        running.now = max(running.now, request.arrival)
        nodes = list(use.nodes())
        while num_pinned + sum(len(node.keys) for node in nodes if not pins[node]) > pool:
            end()
        for node, lookup in zip(nodes, upcoming[number], strict=True):
            hits += node.kept if node.end <= use.lookup_pages else 0
            num_kept += len(node.keys) - node.kept
            num_pinned += 0 if pins[node] else len(node.keys)
            node.kept = len(node.keys)
            pins[node] += 1
            lookups[node] = lookup
        while num_kept > pool:
            lookup, _, node = furthest[0]
            if not node.kept or pins[node] or lookups[node] != -lookup:
                heappop(furthest)
                continue
            gone = min(node.kept, num_kept - pool)
            node.kept -= gone
            num_kept -= gone
        running.begin(number, request.output_tokens)
    return hits * trace.page_size
