"""The stateful checks of the allocators against plain models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire.testing.choices import Choices
from tests.choices import drawn
from tests.memory.arena_machine import ArenaMachine, run_arena
from tests.memory.machine import OPERATIONS, AllocatorMachine, run_allocator
from tests.memory.mamba_machine import MambaMachine, run_mamba
from tests.memory.resized_machine import ResizedMachine, run_resized
from tests.memory.swa_machine import SWAMachine, run_swa

Run = Callable[[int, int], Counter[str]]

MACHINES: list[tuple[Run, tuple[str, ...], tuple[str, ...]]] = [
    (run_allocator, OPERATIONS, ("out of pages", "taken")),
    (run_swa, SWAMachine.OPERATIONS, SWAMachine.EVENTS),
    (run_mamba, MambaMachine.OPERATIONS, MambaMachine.EVENTS),
    (run_arena, ArenaMachine.OPERATIONS, ArenaMachine.EVENTS),
    (run_resized, ResizedMachine.OPERATIONS, ResizedMachine.EVENTS),
]
every_machine = pytest.mark.parametrize(
    ("run", "operations", "events"), MACHINES, ids=[run.__name__ for run, _, _ in MACHINES]
)


def check_seeds(run: Run, operations: tuple[str, ...], events: tuple[str, ...], seeds: range, steps: int) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += run(seed, steps)
    assert min(happened[name] for name in operations) > len(seeds)
    assert min(happened[name] for name in events) > len(seeds) // 10


@every_machine
def test_ten_thousand_steps(run: Run, operations: tuple[str, ...], events: tuple[str, ...]) -> None:
    check_seeds(run, operations, events, range(100), 100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_operations_on_an_arena() -> None:
    """No group starves, whichever is empty, and whatever lies in the way."""
    check_seeds(run_arena, ArenaMachine.OPERATIONS, ArenaMachine.EVENTS, range(10_000, 15_000), 200)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_machine
def test_two_hundred_thousand_steps(run: Run, operations: tuple[str, ...], events: tuple[str, ...]) -> None:
    check_seeds(run, operations, events, range(1_000, 2_000), 200)


def drawn_machine(machine: Callable[[Choices], Any], operations: tuple[str, ...]) -> Any:
    """The same machine with hypothesis choosing."""

    class Drawn(RuleBasedStateMachine):
        @initialize(data=st.data())
        def start(self, data: st.DataObject) -> None:
            self.machine = machine(drawn(data))

        @rule(name=st.sampled_from(sorted(set(operations))), data=st.data())
        def step(self, name: str, data: st.DataObject) -> None:
            getattr(self.machine, name)(drawn(data))
            self.machine.check()

    case = Drawn.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=25)
    return case


TestDrawnAllocatorMachine = drawn_machine(AllocatorMachine, OPERATIONS)
TestDrawnSWAMachine = drawn_machine(SWAMachine, SWAMachine.OPERATIONS)
TestDrawnMambaMachine = drawn_machine(MambaMachine, MambaMachine.OPERATIONS)
TestDrawnArenaMachine = drawn_machine(ArenaMachine, ArenaMachine.OPERATIONS)
TestDrawnResizedMachine = drawn_machine(ResizedMachine, ResizedMachine.OPERATIONS)
