"""Replays of page ids, one request at a time, against the whole engine's loop and a small cache of pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench.eviction.paged_trace import PagedTrace
from bench.eviction.sequential import SequentialReplay, replay_in_order

from quire.errors import InvalidInput
from quire.plan.step_cost import CostModel
from quire.prefix.evict import eviction_policy
from quire.sim.hit_bounds import HitBounds
from quire.sim.pools import plain_pools
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.trace import Trace, TraceRequest, open_trace
from tests.changes import slow_unless_changed
from tests.sim.test_hit_bounds import least_recently_used
from tests.sim.tiny_traces import request, trace_of

COST = CostModel.from_flags(prefill_rate=1e9, decode_ms=0.001)
SOURCES = ("chat:requests=100", "sessions:requests=150", "agent-sessions:sessions=1", "same-text-other-namespace")


def apart(source: str, seed: int) -> Trace:
    """The requests of a workload in its order, so far apart that each ends before the next one arrives. None ends just
    where a page does: the engine never computes the last token of an output, which the bounds count as cached."""
    requests = []
    for at, each in enumerate(open_trace(source, seed=seed, limit=150)):
        output = each.output[:20]
        output = output[:18] if (len(each.prompt) + len(output)) % 16 < 2 else output
        requests.append(TraceRequest(str(at), each.prompt, output, float(at), each.session, each.namespace))
    return trace_of(requests)


@slow_unless_changed("bench/eviction/", "src/quire/prefix/")
@pytest.mark.parametrize("policy", ["lru", "density"])
@pytest.mark.parametrize("source", SOURCES)
def test_it_hits_what_the_engine_hits_one_request_at_a_time(source: str, policy: str) -> None:
    """LRU hits the same in every request. Other policies see the chunks in which an engine evicts and caches."""
    trace = apart(source, seed=4)
    pages = PagedTrace.of(trace, 16)
    pool = max(pages.bounds().working_set_tokens // 8, 16 * max(each.held_pages for each in pages))
    plan = plain_pools(pool, 16, context=max(map(sum, trace.lengths)), max_running=4)
    replayed = Replay(plan, COST, ReplaySettings(policy=policy)).run(trace)
    found = replay_in_order(pages, pool, eviction_policy(policy))
    assert found.hit_rate(pages) == pytest.approx(replayed.hit_rate, abs=0.03) and found.evicted_pages > 0
    if policy == "lru":
        hits = {record.request_id: record.hit_tokens for record in replayed.records}
        assert found.hit_tokens.tolist() == [hits[each.request_id] for each in trace]


@slow_unless_changed("bench/eviction/", "src/quire/prefix/")
@pytest.mark.parametrize("pool_pages", [2, 5, 9, 40])
def test_lru_is_that_of_a_small_cache_of_pages(pool_pages: int) -> None:
    check_small_pool(pool_pages)


def check_small_pool(pool_pages: int) -> None:
    """Whole pages of a prompt are all looked up here: what is written twice needs a page for a moment."""
    draw = np.random.default_rng(pool_pages)
    lengths = 2 * draw.integers(5, size=200) + 1
    requests = [
        request(at, draw.integers(2, size=length).tolist(), [2 + at, *draw.integers(2, size=2).tolist()])
        for at, length in enumerate(lengths.tolist())
    ]
    pages = PagedTrace.of(trace_of(requests), 2)
    found = replay_in_order(pages, 2 * pool_pages, eviction_policy("lru"))
    assert found.hit_tokens.sum() == 2 * least_recently_used(requests, 2, pool_pages)
    held = [each.held_pages for each in pages]
    assert found.refused.tolist() == [each > pool_pages for each in held] and found.refused.any() == (pool_pages < 6)


@slow_unless_changed("bench/eviction/", "src/quire/prefix/")
@pytest.mark.parametrize("policy", ["lru", "density"])
def test_clients_that_close_their_sessions_leave_more_to_hit(policy: str) -> None:
    pages = PagedTrace.of(open_trace("agent-sessions:sessions=8", seed=1), 64)
    pool = pages.bounds().working_set_tokens // 4
    shares = [replay_in_order(pages, pool, eviction_policy(policy), closes=share) for share in (0.0, 0.5, 1.0)]
    hits = [found.hit_tokens.sum() for found in shares]
    assert hits[0] < hits[1] < hits[2] and not shares[2].refused.any()


def test_the_pool_is_never_exceeded_and_every_page_is_evictable_at_the_end() -> None:
    pages = PagedTrace.of(open_trace("sessions:requests=60"), 16)
    replay = SequentialReplay(400, 16, eviction_policy("density"))
    for each in pages:
        replay.serve(each)
        assert replay.tree.num_pages <= 400 and not replay.tree.num_protected
    assert len(replay.tree.evict(10**6)) > 300 and not replay.tree.num_pages


@pytest.mark.parametrize("source", ["chat:requests=40", "same-text-other-namespace", "abort-storm:requests=60"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_have_the_bounds_of_their_tokens(source: str, page_size: int, tmp_path: Path) -> None:
    trace = open_trace(source)
    pages = PagedTrace.of(trace, page_size)
    pages.save(tmp_path / "pages.npz")
    again = PagedTrace.load(tmp_path / "pages.npz")
    plain, found = HitBounds(trace, page_size), again.bounds()
    assert len(pages) == len(again) > 0
    assert (plain.working_set_tokens, plain.ideal_hit_tokens) == (found.working_set_tokens, found.ideal_hit_tokens)
    pool = plain.working_set_tokens // 4
    best = found.optimal_hits(pool)
    assert plain.optimal_hits(pool) == best and sum(best) == found.optimal_hit_tokens(pool) > 0
    for one, other in zip(pages, again, strict=True):
        assert (one.pages == other.pages).all() and one.namespace == other.namespace and one.session == other.session


def test_a_trace_needs_requests_and_pages_tokens() -> None:
    left = request(0, [1, 2], [3], abort_after=0)
    with pytest.raises(InvalidInput, match="no request of the trace runs"):
        PagedTrace.of(trace_of([left]), 2)
    with pytest.raises(InvalidInput, match="a page of 0 tokens"):
        PagedTrace.of(trace_of([left]), 0)
