"""Shorten: fewer steps of a life that end in a violation as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quire.testing.choices import Choices
from tests.fuzz.run import Violation, make_machine

Draws = list[int]
"""The numbers that one step drew."""


def shorten(violation: Violation, seconds: float = 10.0) -> tuple[str, ...]:
    """What is done in a short sequence of steps that ends in a violation, the last one last; empty if none was found.

    Steps of the life are left out, half of them at first and then less, as long as something is still found. Each keeps
    the numbers it drew. Stops after that many seconds.
    """
    setup, steps = _record(violation)
    until = time.monotonic() + seconds
    told = _replay(violation, setup, steps)
    size = max(1, len(steps) // 2)
    while told and time.monotonic() < until:
        at, shorter = 0, False
        while at < len(steps) and time.monotonic() < until:
            fewer = steps[:at] + steps[at + size :]
            found = _replay(violation, setup, fewer)
            if found:
                steps, told, shorter = fewer[: len(found)], found, True
            else:
                at += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return tuple(told)


def _record(violation: Violation) -> tuple[Draws, list[Draws]]:
    """What the life drew: to make its cache, and in each step until the violation."""
    draws: Draws = []
    real = Choices.seeded(violation.seed).below

    def below(n: int) -> int:
        draws.append(real(n))
        return draws[-1]

    choices, setup, steps = Choices(below), draws, []
    try:
        machine = make_machine(violation.level, choices, violation.ask)
        while machine.cache.operations < violation.operation:
            draws = []
            steps.append(draws)
            machine.step(choices)
        machine.end()
    except Exception:
        return setup, steps
    return setup, []


def _replay(violation: Violation, setup: Draws, steps: Sequence[Draws]) -> list[str]:
    """What is done until the violation; empty if there is none. A step that draws more than it had gets zeros."""
    choices = Choices(_again(setup))
    machine = make_machine(violation.level, choices, violation.ask)
    told: list[str] = []
    for draws in steps:
        try:
            machine.step(Choices(_again(draws)))
        except Exception as error:
            return [*told, f"{machine.tell(machine.did)}: {error}"]
        told.append(machine.tell(machine.did))
    try:
        machine.end()
    except Exception as error:
        return [*told, f"end: {error}"]
    return []


def _again(draws: Draws) -> Callable[[int], int]:
    left = iter(draws)
    return lambda n: min(next(left, 0), n - 1)
