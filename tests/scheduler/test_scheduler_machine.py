"""Whole lives of a scheduler: exact outputs, no deadlock, nothing held at the end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.testing.fuzz.choices import Choices
from tests.scheduler.machine import SchedulerMachine, run_scheduler

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
)


def check_lives(seeds: range) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += run_scheduler(seed)
    missing = [name for name in MUST_HAPPEN if not happened[name]]
    assert not missing, f"never happened, so this run shows little: {missing}"
    assert happened["finished"] > 8 * len(seeds)


def test_eighty_lives() -> None:
    check_lives(range(80))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifteen_hundred_lives() -> None:
    check_lives(range(10_000, 11_500))


@settings(max_examples=15)
@given(data=st.data())
def test_any_life(data: st.DataObject) -> None:
    choices = Choices.drawn(data)
    SchedulerMachine(choices).run(choices, num_requests=4)
