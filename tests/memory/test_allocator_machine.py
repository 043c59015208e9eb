"""The stateful check of both allocators against plain sets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.choices import Choices
from tests.memory.machine import OPERATIONS, AllocatorMachine, run_allocator


def check_seeds(seeds: range, steps: int) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += run_allocator(seed, steps)
    assert min(happened[name] for name in (*OPERATIONS, "out of pages", "taken")) > len(seeds)


def test_ten_thousand_steps() -> None:
    check_seeds(range(100), 100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_thousand_steps() -> None:
    check_seeds(range(1_000, 2_000), 200)


class DrawnAllocatorMachine(RuleBasedStateMachine):
    """The same machine with hypothesis choosing."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.machine = AllocatorMachine(Choices.drawn(data))

    @rule(name=st.sampled_from(sorted(set(OPERATIONS))), data=st.data())
    def step(self, name: str, data: st.DataObject) -> None:
        getattr(self.machine, name)(Choices.drawn(data))
        self.machine.check()


DrawnAllocatorMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestDrawnAllocatorMachine = DrawnAllocatorMachine.TestCase
