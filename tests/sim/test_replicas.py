"""Replays of engines behind a router: one is a plain replay, and an index of events has what their caches have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.plan.budget import MemoryPlan
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.replicas import Replicas, ReplicasResult
from quire.sim.routers import ROUTERS, ByEvents, ByPrefix, shared_tokens
from quire.sim.scripts import ScriptedRequest
from quire.sim.settings import Fleet, SimulatedTiers
from quire.sim.trace import open_trace
from quire.sim.trace_request import Planned, Trace, TraceRequest
from quire.testing import small_plan
from tests.changes import SIMULATOR, slow_unless_changed
from tests.covering import covering
from tests.sim.replays import COST, requests

CHAT = "sessions:requests=60,rate=40"
TIERS = SimulatedTiers(host_tokens=8_000, record_bytes=(1 << 16,))


def trace_of(given: list[TraceRequest]) -> Trace:
    return Trace("given", "given", [Planned(each.arrival, lambda arrival, each=each: each) for each in given])


def plan_of(trace: Trace, pages: int = 400) -> MemoryPlan:
    return small_plan(pages, 16, max_requests=16, context=max(prompt + output for prompt, output in trace.lengths))


def replicas_of(router: str, trace: Trace, num_engines: int = 3, pages: int = 400, **more: Any) -> Replicas:
    fleet = {name: more.pop(name) for name in list(more) if name in Fleet.model_fields}
    settings = ReplaySettings(**{"check": "all", "chunk": 256} | more)
    return Replicas(plan_of(trace, pages), COST, settings, Fleet(num_replicas=num_engines, **fleet), router, trace)


def run(router: str, trace: Trace, num_engines: int = 3, **more: Any) -> ReplicasResult:
    return replicas_of(router, trace, num_engines, **more).run()


@covering(router=ROUTERS, tiers=[None, TIERS], overlap=[False, True])
def test_one_engine_is_a_plain_replay(router: str, tiers: SimulatedTiers | None, overlap: bool) -> None:
    trace = open_trace(CHAT)
    settings = ReplaySettings(check="all", chunk=256, tiers=tiers, overlap=overlap)
    alone = Replay(plan_of(trace), COST, settings).run(trace)
    found = run(router, trace, 1, tiers=tiers, overlap=overlap)
    assert found.engines[0]["digest"] == alone.digest
    assert (found.hit_tokens, found.seconds) == (alone.hit_tokens, max(each.finished or 0 for each in alone.records))
    assert found.ttft_s == alone.first_token_seconds() and found.imbalance == 1


@covering(router=ROUTERS, more=[{}, {"restart_every": 0.3}, {"flush_every": 0.5}, {"tiers": TIERS}])
def test_what_is_told_is_what_engines_counted(router: str, more: dict[str, Any]) -> None:
    trace = open_trace(CHAT)
    replicas = replicas_of(router, trace, event_delay=0.01, event_loss=0.1, **more)
    found = replicas.run()
    records = [record for engine in replicas.engines for record in engine.recorder.records]
    assert found.requests == len(records) == len(trace) == len({record.request_id for record in records})
    assert found.hit_tokens == sum(engine.cache.statistics().hit_tokens for engine in replicas.engines)
    assert found.hit_tokens == sum(record.hit_tokens for record in records) > 0
    assert found.hit_tokens + found.computed_tokens == trace.prompt_tokens
    assert (found.restarts > 0) == (not more.keys().isdisjoint({"restart_every", "flush_every"}))
    assert run(router, trace, event_delay=0.01, event_loss=0.1, **more) == found


def check_events(**more: Any) -> None:
    """When all events have arrived, the index has what the trees have."""
    trace = open_trace(CHAT)
    replicas = replicas_of("events", trace, pages=200, **more)
    found = replicas.run()
    assert (found.events["lost"] > 0) == ("event_loss" in more)
    assert (found.events["asked"] > 0) == ("event_loss" in more or "restart_every" in more)
    router = replicas.router
    assert isinstance(router, ByEvents)
    router.wire.pass_until(1e9)
    seen = 0
    for request in trace:
        matches = [engine.cache.tree.match(request.namespace, request.prompt) for engine in replicas.engines]
        expected = [(16 * match.num_here, 16 * match.num_pages) for match in matches]
        assert router.index.held(request.prompt, request.namespace) == expected
        seen += sum(both for _, both in expected)
    assert seen > 0


@covering(
    late=[{}, {"event_delay": 0.2}],
    lost=[{}, {"event_loss": 0.3}],
    restarts=[{}, {"restart_every": 0.4}],
    flushes=[{}, {"flush_every": 0.7}],
    tiers=[None, TIERS],
)
def test_the_index_has_what_the_caches_have(
    late: dict[str, Any], lost: dict[str, Any], restarts: dict[str, Any], flushes: dict[str, Any], tiers: Any
) -> None:
    check_events(tiers=tiers, **late, **lost, **restarts, **flushes)


def two_prompts(num: int, gap: float) -> Trace:
    """Two prompts by turns, but each time the other first; a request ends before the next comes."""
    long = requests([(161, 2), (161, 2)])
    return trace_of(
        [
            replace(long[(at + at // 2) % 2], request_id=f"r{at}", arrival=at * gap, output=np.array([at], np.int32))
            for at in range(num)
        ]
    )


def test_a_prompt_goes_where_its_pages_are() -> None:
    """Two engines, and each has room for one prompt: with events, all but the first two prompts are hit."""
    trace = two_prompts(20, gap=0.1)
    hits = {name: run(name, trace, 2, pages=12).hit_tokens // 160 for name in ROUTERS}
    assert hits["events"] == 18
    assert hits["round-robin"] < 5 and hits["least-loaded"] == 9, "which sees an idle fleet, and takes the first"


@pytest.mark.parametrize(("delay", "hits"), [(0.0, 9), (0.25, 7), (10.0, 0)])
def test_a_late_event_is_known_late(delay: float, hits: int) -> None:
    """A prompt each tenth of a second, in a fleet where the router remembers nothing else: what it expects to be hit
    are the prompts after the delay."""
    trace = trace_of([replace(each, arrival=0.1 * at) for at, each in enumerate(requests([(161, 2)] * 10, shared=160))])
    replicas = replicas_of("events", trace, 2, event_delay=delay)
    expected: list[float] = []
    choose = replicas.router.choose

    def chosen(*given: Any) -> tuple[int, float]:
        found = choose(*given)
        expected.append(found[1])
        return found

    replicas.router.choose = chosen  # type: ignore[method-assign]
    replicas.run()
    assert expected == [161] * (10 - hits) + [1] * hits


def test_work_that_waits_counts_as_much_as_work_that_is_missing() -> None:
    """A burst of one prompt is spread when the queue of the engine that has it is longer than the prompt."""
    burst = requests([(161, 2)] + [(177, 2)] * 40, shared=160)
    trace = trace_of([replace(each, arrival=1.0 if at else 0.0) for at, each in enumerate(burst)])
    found = run("events", trace, 2)
    first, second = (each["requests"] for each in found.engines)
    assert (first, second) == (38, 3)


def test_the_production_choice_reads_the_beginning() -> None:
    """Sessions stay together. Without one, what follows the beginning of all prompts decides."""
    trace = open_trace(CHAT)
    replicas = replicas_of("prefix", trace, 4)
    replicas.run()
    places: dict[str, set[int]] = {}
    for at, engine in enumerate(replicas.engines):
        for record in engine.recorder.records:
            places.setdefault(record.request_id.rpartition(".")[0], set()).add(at)
    assert len(places) > 4 and sum(len(each) == 1 for each in places.values()) > 0.8 * len(places)
    opening, *users, end = (np.arange(1_000 * at, 1_000 * at + 800, dtype=np.int32) for at in range(4))
    prompts = [np.concatenate((opening, user, end[:length])) for user in users for length in (1, 2)]
    talks = trace_of([TraceRequest(f"r{at}", each, end[:1]) for at, each in enumerate(prompts)])
    assert shared_tokens(talks) == 800 and shared_tokens(trace) == 0
    router = ByPrefix(talks, Fleet(num_replicas=2), 16)
    keys = [router.key(ScriptedRequest(each, 0.0)) for each in talks]
    assert keys[0] == keys[1] != keys[2] == keys[3]


@slow_unless_changed(*SIMULATOR)
def test_events_hit_more_than_what_knows_nothing() -> None:
    trace = open_trace("chat:requests=150,rate=20")
    hits = {name: run(name, trace, 4, pages=1_500, check="off").hit_rate for name in ROUTERS}
    assert hits["events"] > max(hits["round-robin"], hits["least-loaded"]) + 0.1
