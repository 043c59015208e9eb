"""Chunks beside decodes: how long requests that decode wait for prompts, and prompts for them, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.counters import plain
from quire.plan.step_cost import CostModel
from quire.scheduler.chunk_budget import LEAST_TOKENS, Backlog, ChunkBudget
from quire.scheduler.request import RequestState
from quire.scheduler.step import Step
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.result import ReplayResult
from quire.sim.trace_request import TraceRequest
from quire.testing import small_plan

CPU = CostModel(launch=0.005, weights=0.0, token=2e-4, pair=5e-8, reads=((6e-7, 0),))
GPU = CostModel(launch=0.0005, weights=0.008, token=6e-5, pair=1e-9, reads=((5e-8, 0),))
CHUNK = 2048
LEARNED = 12
"""Steps after which the costs must be known."""


@dataclass
class Watched:
    """A replay, and of each step the true seconds: all of it, without prompts, and of all prompts that wait."""

    replay: Replay
    result: ReplayResult
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)  # tokens of prompts in each of these, -1 if none is ready


def clients(count: int, rounds: int, *, prompt: int = 600, shared: int = 400, output: int = 64) -> list[TraceRequest]:
    """Each client sends its next request when the last one has ended; all begin at once."""
    random = np.random.default_rng(0)
    same = random.integers(1000, size=shared, dtype=np.int32)
    return [
        TraceRequest(
            request_id=f"{turn}.{client}",
            prompt=np.concatenate((same, random.integers(1000, size=prompt - shared, dtype=np.int32))),
            output=random.integers(1000, size=int(output * random.uniform(0.8, 1.2)), dtype=np.int32),
            arrival=0.0,
            after=f"{turn - 1}.{client}" if turn else "",
        )
        for turn in range(rounds)
        for client in range(count)
    ]


def watched(cost: CostModel, trace: list[TraceRequest], target: float | str, **settings: Any) -> Watched:
    """Replay the trace with all prompts in reach of the pool."""
    plan = small_plan(20_000, 32, context=8192, max_requests=256)
    replay = Replay(plan, cost, ReplaySettings(target_itl_ms=target, chunk=CHUNK, **settings))
    scheduler, schedule = replay.scheduler, replay.scheduler.schedule
    found = Watched(replay, None)  # type: ignore[arg-type]

    def seconds(step: Step, some: np.ndarray) -> float:
        return cost.launch + cost.seconds(step.starts[some], step.ends[some]) if some.any() else 0.0

    def watch() -> Step:
        waits = [r for r in scheduler.requests if r.num_known - r.num_launched > 1]
        backlog = sum(cost.chunk_seconds(r.num_launched, r.num_known - r.num_launched) for r in waits)
        ready = any(r.state is RequestState.RUNNING for r in waits)
        step = schedule()
        decodes = step.starts >= step.batch.prompt
        if decodes.any():
            found.steps.append((seconds(step, decodes | True), seconds(step, decodes), backlog))
            found.prompts.append(int(step.counts[~decodes].sum()) if ready else -1)
        return step

    scheduler.schedule = watch  # type: ignore[method-assign]
    found.result = replay.run(trace)
    return found


def check_law(cost: CostModel, count: int, *, misfit: float = 1.15, **settings: Any) -> None:
    """No request that decodes waits for more than three steps' time, or its share of what waits. Prompts advance in
    every step, no first token is late for it, and all takes as long as without limits."""
    trace = clients(count, 3)
    free, kept = (watched(cost, trace, target, **settings) for target in ("off", "auto"))
    least = cost.chunk_seconds(600, 2 * LEAST_TOKENS)
    for whole, alone, backlog in kept.steps[LEARNED:]:
        assert whole <= misfit * max(3 * alone, alone + backlog / 24) + least, "decodes wait for prompts"
    assert 0 not in kept.prompts, "no prompt advances"
    assert kept.result.itl_s[2] < 0.75 * free.result.itl_s[2]
    assert kept.result.output_rate > 0.98 * free.result.output_rate
    assert kept.result.mean_first_token_seconds < 1.2 * free.result.mean_first_token_seconds
    assert kept.result.first_token_seconds([99])[0] < 1.25 * free.result.first_token_seconds([99])[0]
    assert kept.result.output_tokens == free.result.output_tokens


def test_decodes_wait_for_a_share_of_prompts() -> None:
    check_law(CPU, 64)
    check_law(GPU, 64, misfit=1.35, overlap=True)  # small chunks are free beside its weights, and no line fits that


def check_target(target_ms: float = 50.0) -> None:
    """With a target, no step takes longer, whatever waits; unless its decodes alone do, or the least chunk."""
    found = watched(CPU, clients(16, 3), target_ms)
    least = CPU.chunk_seconds(600, 2 * LEAST_TOKENS)
    assert any(whole > 0.9 * target_ms / 1e3 for whole, *_ in found.steps), "the target is not used"
    for whole, alone, _ in found.steps[LEARNED:]:
        assert whole <= max(1.08 * target_ms / 1e3, alone) + least, "a step takes longer than its target"
    assert 0 not in found.prompts, "no prompt advances"


def test_a_step_keeps_its_target() -> None:
    check_target()
    check_target(1.0)  # less than decodes take: prompts advance by the least chunk


def test_a_single_client_and_an_empty_engine_are_not_limited() -> None:
    found = watched(CPU, clients(1, 3), "auto")
    assert found.result.chunk_budget == plain(ChunkBudget().counters())
    assert found.result.seconds == watched(CPU, clients(1, 3), "off").result.seconds


def test_replays_are_repeatable() -> None:
    first, second = (watched(GPU, clients(16, 2), "auto", overlap=True).result for _ in range(2))
    assert (first.digest, first.seconds, first.chunk_budget) == (second.digest, second.seconds, second.chunk_budget)


def test_a_long_prompt_is_computed_beside_a_short_answer() -> None:
    """8,000 tokens beside one request: the first token is late by a quarter, and no gap is half as long."""
    trace = [*clients(1, 1, output=400), *clients(1, 1, prompt=8000, shared=0, output=4)]
    trace[1] = TraceRequest(request_id="long", prompt=trace[1].prompt, output=trace[1].output, arrival=0.4)
    free, kept = (watched(CPU, trace, target) for target in ("off", "auto"))
    gaps = [max(each.replay.recorder.gaps.all()) for each in (free, kept)]
    late = [max(record.first_token - record.arrived for record in each.result.records) for each in (free, kept)]  # type: ignore[operator]
    assert gaps[1] < gaps[0] / 2 and late[1] < 1.25 * late[0]


def test_what_limits_is_said() -> None:
    contexts, none = np.full(8, 500), np.empty(0, dtype=np.int64)
    step: Any = SimpleNamespace(starts=contexts - 1, ends=contexts, is_decode=True)
    for target, said in ((None, "twice its decodes"), (0.05, "a target of 50 ms")):
        budget = ChunkBudget(target)
        assert not budget.why
        budget.measured(step, 0.01)
        budget.begin(contexts, 0, Backlog(none, none, 0, 0))
        assert said in budget.why and budget.counters().alone_seconds == pytest.approx(0.01)
    budget = ChunkBudget()
    budget.measured(step, 0.01)
    budget.begin(contexts, 0, Backlog(none, none, 1000, 10**7))
    assert "a share of all that wait" in budget.why
