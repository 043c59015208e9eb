"""The stateful check of allocator + tree + cache against a plain-set model, from seeds and from hypothesis."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.testing.fuzz.choices import Choices
from tests.cache.machine import WEIGHTS, CacheMachine, run_cache

MUST_HAPPEN = (
    "hit",
    "split",
    "evicted",
    "duplicate",
    "out of pages",
    "fenced",
    "two in flight",
    "commit in flight",
    "outdated hit",
    "abort",
    "batch",
    "decode",
    "clear",
)


def check_seeds(seeds: range, steps: int) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += run_cache(seed, steps)
    rare = {name: happened[name] for name in MUST_HAPPEN if happened[name] < len(seeds) // 5 + 1}
    assert not rare, f"hardly ever happened, so this run shows little: {rare}"
    return happened


def test_four_thousand_steps() -> None:
    happened = check_seeds(range(20), 200)
    assert sum(happened[name] for name in WEIGHTS) == 4_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_and_twenty_thousand_steps() -> None:
    happened = check_seeds(range(10_000, 10_400), 300)
    total = sum(happened[name] for name in WEIGHTS)
    print(f"{total:,} steps: {dict(happened)}")
    assert total == 120_000


class DrawnCacheMachine(RuleBasedStateMachine):
    """The same machine with hypothesis choosing, which finds the shortest failing sequence."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.machine = CacheMachine(Choices.drawn(data))

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.machine.run("begin", Choices.drawn(data))

    @precondition(lambda self: self.machine.model.live)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        self.machine.run("extend", Choices.drawn(data))

    @precondition(lambda self: self.machine.model.live)
    @rule(data=st.data())
    def extend_and_launch(self, data: st.DataObject) -> None:
        self.machine.run("extend", Choices.drawn(data))
        self.machine.run("launch", Choices.drawn(data))

    @precondition(lambda self: self.machine.flights)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.machine.run("settle", Choices.drawn(data))

    @precondition(lambda self: any(s.committed < s.settled for s in self.machine.model.live))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.machine.run("commit", Choices.drawn(data))

    @precondition(lambda self: self.machine.model.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.machine.run("finish", Choices.drawn(data))

    @rule(name=st.sampled_from(("evict", "clear", "look")), data=st.data())
    def other(self, name: str, data: st.DataObject) -> None:
        self.machine.run(name, Choices.drawn(data))


DrawnCacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestDrawnCacheMachine = DrawnCacheMachine.TestCase
