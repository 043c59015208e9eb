"""Replays that explain: causes add up for every request, name what it was evicted for and when, and change nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.errors import InvalidInput
from quire.observe.explain import Cause
from quire.plan.step_cost import CostModel
from quire.sim.comparison import Grid, SimulatedModel, replay_one
from quire.sim.replay import ReplaySettings
from quire.sim.result import ReplayResult
from quire.sim.trace import open_trace
from tests.changes import SIMULATOR, in_turns, slow_unless_changed
from tests.covering import covering, few
from tests.sim.replays import COST, HYBRIDS, run

FAST = CostModel.from_flags(prefill_rate=200_000, decode_ms=1)
WORKLOADS = {
    "sessions": 700, "agents": 1500, "over-commit": 300, "same-text-other-namespace": 150, "match-unit": 300,
    "abort-storm": 300,
}  # fmt: skip
"""Pages of a pool that is too small for each."""


def replayed(workload: str, **settings: object) -> ReplayResult:
    trace = open_trace(workload, limit=60, seed=2)
    usual = {"page_size": 16, "context": 30_000, "chunk": 2048, "cost": FAST, "num_pages": WORKLOADS[workload]}
    return run(trace, **usual | {"explain": True, "check": "off"} | settings)  # type: ignore[arg-type]


def check(result: ReplayResult) -> Counter[str]:
    """Every law of the records' explanations. Returns the tokens by cause."""
    records = {record.request_id: record for record in result.records}
    for record in result.records:
        explanation = record.explanation
        if explanation is None:
            assert record.refused or record.hit_tokens == record.output_tokens == 0
            continue
        assert explanation.prompt_tokens == record.prompt_tokens
        assert explanation.hit_tokens == record.hit_tokens
        at = 0
        for reason in explanation.reasons:
            assert reason.start == at and reason.tokens > 0
            at += reason.tokens
            if reason.cause is Cause.EVICTED:
                evictor = records[reason.by.partition(" and ")[0]]
                assert reason.seconds_ago is not None and record.admitted is not None
                moment = record.admitted - reason.seconds_ago
                assert evictor.arrived - 1e-9 <= moment <= (evictor.finished or evictor.arrived) + 1e-9
        assert at == record.prompt_tokens
    causes = result.tokens_by_cause()
    assert sum(causes.values()) + result.refused_tokens == result.prompt_tokens
    assert causes["hit"] == result.hit_tokens
    return Counter(causes)


@pytest.mark.parametrize("workload", in_turns(WORKLOADS, 3, *SIMULATOR))
def test_causes_add_up_and_evictions_have_a_culprit_and_a_time(workload: str) -> None:
    causes = check(replayed(workload))
    expected = {"same-text-other-namespace": "namespace", "match-unit": "page"} | dict.fromkeys(
        ("abort-storm", "over-commit"), "new"
    )
    assert causes[expected.get(workload, "evicted")] > 0


@slow_unless_changed(*SIMULATOR, "src/quire/observe/")
@covering(groups=[name for name in HYBRIDS if name != "full"], overlap=[False, True])
def test_groups_that_keep_less_than_everything_add_up_too(groups: str, overlap: bool) -> None:
    frames = {"window": (700, 90), "chunk": (700, 90), "state": (700, 40)}[groups]
    causes = check(replayed("sessions", groups=groups, frames=frames, overlap=overlap))
    assert causes["group"] > 0
    assert causes["evicted"] > 0


@slow_unless_changed(*SIMULATOR, "src/quire/observe/")
@pytest.mark.parametrize("groups", few(HYBRIDS, 2))
def test_to_explain_changes_nothing(groups: str) -> None:
    explained, plain = (replayed("sessions", groups=groups, explain=explain) for explain in (True, False))
    assert explained.digest == plain.digest
    assert all(record.explanation is None for record in plain.records)
    assert sum(plain.tokens_by_cause().values()) == 0


def test_one_replay_is_of_one_combination() -> None:
    trace = open_trace("chat", limit=4)
    grid = Grid(
        models=[SimulatedModel(cost=lambda plan: COST)],
        policies=["lru", "lfu"],
        pools=[60_000],
        page_sizes=[16],
        max_running=8,
        settings=ReplaySettings(explain=True),
    )
    with pytest.raises(InvalidInput, match="these are 2 replays"):
        replay_one(trace, grid, lambda what, ended: None)
