"""The stateful check of allocator + tree + cache against a plain-set model, from seeds and from hypothesis."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.testing.choices import Choices
from tests.changes import CORE, slow_unless_changed
from tests.choices import drawn
from tests.fuzz.cache_machine import CacheMachine
from tests.fuzz.run import run_life

MUST_HAPPEN = (
    "hit",
    "split",
    "evicted",
    "dropped",
    "revived",
    "duplicate",
    "out of pages",
    "fault",
    "fenced",
    "two in flight",
    "settled out of order",
    "commit in flight",
    "outdated hit",
    "short of the match",
    "abort",
    "batch",
    "decode",
    "commit of several",
    "pass",
    "clear",
)


def check_seeds(seeds: range, operations: int) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        life = run_life("cache", seed, operations)
        assert life.violation is None, life.violation
        happened += life.happened
    rare = {name: happened[name] for name in MUST_HAPPEN if happened[name] < len(seeds) // 5 + 1}
    assert not rare, f"hardly ever happened, so this run shows little: {rare}"
    return happened


@slow_unless_changed(*CORE)
def test_twenty_thousand_operations() -> None:
    check_seeds(range(40), 500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_half_a_million_operations() -> None:
    happened = check_seeds(range(10_000, 11_000), 500)
    print(dict(happened))


class DrawnCacheMachine(RuleBasedStateMachine):
    """The same machine with hypothesis choosing, which finds the shortest failing sequence."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.machine = CacheMachine(drawn(data))

    @rule(name=st.sampled_from(("begin", "evict", "clear", "look", "count")), data=st.data())
    def other(self, name: str, data: st.DataObject) -> None:
        self.machine.run(name, drawn(data))

    @precondition(lambda self: self.machine.model.live)
    @rule(name=st.sampled_from(("extend", "launch", "finish", "commit", "mark")), data=st.data())
    def with_requests(self, name: str, data: st.DataObject) -> None:
        self.machine.run(name, drawn(data))

    @precondition(lambda self: self.machine.possible("execute"))
    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        self.machine.run("execute", drawn(data))

    @precondition(lambda self: self.machine.possible("settle"))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.machine.run("settle", drawn(data))


DrawnCacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestDrawnCacheMachine = DrawnCacheMachine.TestCase


def test_a_seed_is_a_life() -> None:
    first, again, other = (run_life("cache", seed, 300) for seed in (1, 1, 2))
    assert first.digest == again.digest != other.digest
    assert first.happened == again.happened


def test_choices_are_the_same_on_every_machine() -> None:
    choices = Choices.seeded(1)
    assert [choices.below(100) for _ in range(6)] == [13, 84, 76, 25, 49, 44]
