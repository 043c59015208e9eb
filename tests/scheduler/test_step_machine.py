"""Steps that draw several tokens and keep some, against a model of their arithmetic."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.changes import CORE, slow_unless_changed
from tests.choices import drawn
from tests.scheduler.step_machine import StepMachine, run_steps

MUST_HAPPEN = (
    "several",
    "several of several",
    "mixed",
    "kept all",
    "kept some",
    "kept one",
    "ended by stop",
    "ended by length",
    "ended inside",
    "preemption",
    "abort in flight",
    "abort with several",
    "settled too late",
)


def check_lives(seeds: range) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += run_steps(seed, 150).happened
    missing = [name for name in MUST_HAPPEN if not happened[name]]
    assert not missing, f"never happened, so this run shows little: {missing}"


@slow_unless_changed(*CORE)
def test_forty_lives() -> None:
    check_lives(range(40))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_lives() -> None:
    check_lives(range(10_000, 12_000))


class DrawnStepMachine(RuleBasedStateMachine):
    """The same machine with hypothesis choosing."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.machine = StepMachine(drawn(data))

    @rule(name=st.sampled_from(sorted(set(StepMachine.OPERATIONS))), data=st.data())
    def step(self, name: str, data: st.DataObject) -> None:
        getattr(self.machine, name)(drawn(data))
        self.machine.check()

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.end()


DrawnStepMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestDrawnStepMachine = DrawnStepMachine.TestCase
