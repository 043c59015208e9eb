"""The canary's bookkeeping beside a model of what was damaged, on random lives of a small cache."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.testing.choices import Choices
from tests.canary.machine import OPERATIONS, CanaryMachine, run_canary
from tests.changes import CANARY, slow_unless_changed
from tests.covering import few


@slow_unless_changed(*CANARY)
@pytest.mark.parametrize(("everything", "late"), [(True, 0), (False, 0), (False, 3)])
@pytest.mark.parametrize("seed", few(range(20), 10))
def test_what_is_damaged_is_found_and_nothing_else(seed: int, everything: bool, late: int) -> None:
    run_canary(seed, 120, everything=everything, late=late)


def test_every_operation_happens() -> None:
    assert {*OPERATIONS, "retained", "pinned", "whole pages together"} == {
        name for seed in range(5) for name in +run_canary(seed, 120)
    }


@slow_unless_changed(*CANARY)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_any_life(data: st.DataObject) -> None:
    """As above, with choices that shrink."""
    choices = Choices(lambda n: data.draw(st.integers(0, n - 1)))
    machine = CanaryMachine(choices)
    for _ in range(25):
        machine.step(choices)
