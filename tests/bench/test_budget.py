"""The budget of a token: stages do not count the time of stages inside them."""

from __future__ import annotations

import time

import pytest
from bench.engine import budget

pytestmark = pytest.mark.timeout(120)


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_stage_is_the_time_of_its_own_calls() -> None:
    stages = budget.Stages()
    inner = stages.wrapped("inner", lambda: busy(0.03))

    def around() -> str:
        busy(0.01)
        inner()
        return "done"

    assert stages.wrapped("outer", around)() == "done"
    assert 0.03 <= stages.spent["inner"] < 0.04 and 0.005 <= stages.spent["outer"] < 0.02


def test_methods_are_as_before_behind_a_measurement() -> None:
    methods = [each for every in budget.STAGES.values() for each in every]
    real = [getattr(kind, name) for kind, name in methods]
    with budget.Stages().measured():
        assert all(getattr(kind, name) is not own for (kind, name), own in zip(methods, real, strict=True))
    assert [getattr(kind, name) for kind, name in methods] == real


def test_a_budget_has_every_stage() -> None:
    """An engine of few tokens; what it takes is not compared with anything."""
    found = budget.engine_budget("float32", 8, 1)
    assert set(found["stages"]) == set(budget.STAGES) and found["whole"] > 0
    assert found["stages"]["model: all layers in one call"] > 0 and found["bytes"] > 1 << 23
    result = {"engines": {"float32": {**found, "cached_rate": 1e10, "memory_rate": 1e9}}}
    shown = budget.table({**result, "way_out": {"engine_us": 1.0, "front_us": 2.0, "total_us": 3.0}})
    assert all(f"| {stage} |" in shown for stage in budget.STAGES)
