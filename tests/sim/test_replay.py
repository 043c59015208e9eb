"""Replays: what they hit, evict and preempt, when requests come and go, and that it is the same every time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from quire.errors import InvalidInput
from quire.sim.hit_bounds import HitBounds
from quire.sim.trace import TraceRequest, open_trace
from quire.sim.workloads import WORKLOADS
from tests.changes import SIMULATOR, in_turns, slow_unless_changed
from tests.sim.replays import COST, HYBRIDS, SLOW, replay_of, requests, run
from tests.sim.tiny_traces import trace_of


def hits_without_limits(trace: Iterable[TraceRequest], page_size: int) -> int:
    """Prompt tokens that a cache finds if it keeps everything and serves one request after the other."""
    seen: set[tuple[object, bytes]] = set()
    hits = 0
    for request in trace:
        pages = (len(request.prompt) - 1) // page_size
        found = 0
        while found < pages and (request.namespace, request.prompt[: (found + 1) * page_size].tobytes()) in seen:
            found += 1
        hits += found * page_size
        tokens = np.concatenate((request.prompt, request.output))[:-1]  # the last token is drawn and never computed
        for page in range(1, len(tokens) // page_size + 1):
            seen.add((request.namespace, tokens[: page * page_size].tobytes()))
    return hits


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_after_the_other_in_a_large_pool_hits_what_an_endless_cache_would(page_size: int) -> None:
    trace = open_trace("chat:requests=14", seed=3)
    serial = [replace(request, arrival=index * 1e4, after="") for index, request in enumerate(trace)]
    result = run(serial, num_pages=400_000 // page_size, page_size=page_size, context=40_000, chunk=4096)
    assert result.hit_tokens == hits_without_limits(serial, page_size) > 0
    assert result.evicted_tokens == result.preemptions == 0
    ideal = HitBounds(trace, page_size)
    assert (
        0 <= ideal.ideal_hit_tokens - result.hit_tokens <= 14 * page_size
    )  # it counts last tokens that are never computed
    assert result.records[0].hit_tokens == 0


@slow_unless_changed(*SIMULATOR)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_replay_twice_is_the_same(overlap: bool) -> None:
    trace = open_trace("agents", limit=20, seed=1)
    settings = {"num_pages": 600, "page_size": 16, "context": 30_000, "chunk": 2048, "overlap": overlap}
    first, second = run(trace, **settings), run(trace, **settings)
    unchecked = run(trace, **settings, check="off")
    assert first.digest == second.digest == unchecked.digest
    assert first.evicted_tokens > 0
    assert run(trace, **settings | {"num_pages": 560}).digest != first.digest


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_who_is_preempted_still_gets_its_own_output(groups: str, overlap: bool) -> None:
    trace = requests([(10, 30)] * 6 + [(40, 8)], shared=4)
    result = run(trace, num_pages=24, groups=groups, overlap=overlap)
    assert result.preemptions > 0
    assert sum(record.preemptions for record in result.records) == result.preemptions
    assert result.count("length") == 7
    assert result.output_tokens == 6 * 30 + 8


def test_a_client_that_leaves_is_let_go() -> None:
    trace = requests([(12, 20)] * 4, gap=0.001)
    trace[1] = replace(trace[1], abort_after=5)
    trace[2] = replace(trace[2], abort_after=0)
    for overlap in (False, True):
        result = run(trace, overlap=overlap)
        outputs = {record.request_id: record.output_tokens for record in result.records}
        assert outputs == {"r0": 20, "r1": 5, "r2": 0, "r3": 20}
        assert result.count("abort") == 2
        assert {record.request_id for record in result.records if record.admitted is None} == {"r2"}


def test_a_turn_comes_when_the_one_before_has_ended_and_the_user_has_thought() -> None:
    first, second, third = requests([(8, 4), (20, 4), (30, 4)])
    second = replace(second, after="r0", think=7.0)
    third = replace(third, after="r1", think=1.0)
    records = {record.request_id: record for record in run([first, second, third]).records}
    assert records["r0"].finished is not None and records["r1"].finished is not None
    assert records["r1"].arrived == pytest.approx(records["r0"].finished + 7.0)
    assert records["r2"].arrived == pytest.approx(records["r1"].finished + 1.0)


def test_what_can_never_fit_is_refused_and_its_next_turn_still_comes() -> None:
    long, after, short = requests([(500, 4), (12, 4), (8, 4)])
    result = run([long, replace(after, after="r0", think=2.0), short], num_pages=16, context=600)
    ends = {record.request_id: record.end for record in result.records}
    assert ends == {"r0": "refused", "r1": "length", "r2": "length"}
    refused = next(record for record in result.records if record.refused)
    assert "500 prompt tokens" in refused.refused
    assert (result.prompt_tokens, result.refused_tokens) == (520, 500)


def test_a_client_that_leaves_before_it_runs_counts_in_no_rate() -> None:
    trace = requests([(500, 4), (12, 4), (8, 4)])
    trace = [replace(trace[0], abort_after=0), replace(trace[1], abort_after=0), trace[2]]
    result = run(trace, num_pages=16, context=600)
    assert [record.end for record in result.records] == ["refused", "abort", "length"]
    assert (result.prompt_tokens, result.refused_tokens) == (8, 0)
    assert HitBounds(trace_of(trace), 4).prompt_tokens == 8


def test_a_replay_runs_once() -> None:
    replay = replay_of()
    replay.run(requests([(8, 4)]))
    with pytest.raises(InvalidInput, match="this replay has run"):
        replay.run(requests([(8, 4)]))


@slow_unless_changed(*SIMULATOR)
def test_a_pool_between_two_requests_is_seen_to_be_idle() -> None:
    first, busy = run(requests([(16, 3), (16, 3)], gap=1000.0)), requests([(24, 10)] * 400, gap=50.0)
    for result in (first, run(busy, check="off")):
        samples = result.occupancy
        assert len(samples) <= 512
        assert samples[-1].running == samples[-1].held == 0
        for sample, following in pairwise(samples):
            if following.time - sample.time > 20:  # nothing runs as long as that
                assert sample.running == sample.held == 0
    assert any(sample.held for sample in first.occupancy)


def test_idle_time_is_skipped_and_times_add_up() -> None:
    trace = requests([(16, 3), (16, 3)], gap=1000.0)
    result = run(trace, cost=SLOW)
    first, second = result.records
    # 16 prompt tokens at 500 a second and half a millisecond for the launch; then two decode steps of 50 ms.
    assert first.first_token == pytest.approx(16 / 500 + 0.05 - 0.032 + 0.0005)
    assert first.finished == pytest.approx(3 * 0.0505)
    assert second.arrived == 1000.0
    assert result.seconds == pytest.approx(1000.0 + 3 * 0.0505)
    assert result.first_token_seconds((50,)) == pytest.approx([0.0505])


def test_no_more_run_than_are_allowed() -> None:
    trace = requests([(8, 10)] * 12)
    replay = replay_of(max_running=3)
    result = replay.run(trace)
    assert max(sample.running for sample in result.occupancy) == 3
    assert all(0 <= sample.held + sample.cached <= 1 for sample in result.occupancy)
    assert result.count("length") == 12


@pytest.mark.parametrize("name", in_turns(WORKLOADS, 3, *SIMULATOR))
def test_every_workload_replays_with_all_checks(name: str) -> None:
    trace = open_trace(name, limit=16, seed=2)
    longest = max(sum(lengths) for lengths in trace.lengths)
    result = run(
        trace,
        num_pages=max(longest // 16 + 2, 512),
        page_size=16,
        context=longest,
        max_running=16,
        chunk=2048,
        cost=COST,
    )
    assert len(result.records) == len(trace)
    assert result.count("refused") == 0


@slow_unless_changed(*SIMULATOR)
@pytest.mark.parametrize("name", ["over-commit", "abort-storm"])
def test_steps_overlap_where_little_fits(name: str) -> None:
    """The last running request may end while others wait and nothing was launched: the next step takes them."""
    trace = open_trace(name, limit=60, seed=1)
    longest = max(sum(lengths) for lengths in trace.lengths)
    result = run(trace, num_pages=longest // 16 + 2, page_size=16, context=longest, chunk=2048, cost=COST, overlap=True)
    assert len(result.records) == len(trace) and not result.count("refused")
