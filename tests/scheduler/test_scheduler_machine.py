"""Whole lives of a scheduler: exact outputs, no deadlock, nothing held at the end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.changes import CORE, slow_unless_changed
from tests.choices import drawn
from tests.fuzz.run import run_life
from tests.fuzz.scheduler_machine import SchedulerMachine

MUST_HAPPEN = (
    "hit",
    "evicted",
    "preemption",
    "prefix wait",
    "chunk",
    "mixed",
    "at the limit",
    "refused",
    "abort waiting",
    "abort running",
    "abort in flight",
    "finished by length",
    "finished by stop",
    "empty",
)


def check_lives(seeds: range) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        life = run_life("scheduler", seed, 600)
        assert life.violation is None, life.violation
        happened += life.happened
    missing = [name for name in MUST_HAPPEN if not happened[name]]
    assert not missing, f"never happened, so this run shows little: {missing}"


@slow_unless_changed(*CORE)
def test_forty_lives() -> None:
    check_lives(range(40))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_lives() -> None:
    check_lives(range(10_000, 11_000))


@slow_unless_changed(*CORE)
@settings(max_examples=15)
@given(data=st.data())
def test_any_life(data: st.DataObject) -> None:
    choices = drawn(data)
    machine = SchedulerMachine(choices)
    for _ in range(40):
        machine.step(choices)
