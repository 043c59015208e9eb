"""Running: lives, one after the other, until something is wrong or enough was done; and what is said of it.

A life is one cache of its own plan, made and driven from one seed. Seeds count up from the first one, so that a life
that fails can be run again alone.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from quire.errors import QuireError
from quire.testing.fuzz.cache_machine import CacheMachine
from quire.testing.fuzz.choices import Choices
from quire.testing.fuzz.followed_cache import FollowedCache
from quire.testing.fuzz.scheduler_machine import SchedulerMachine
from quire.testing.mutants import find, injected

LIFE = 600
"""Operations of one life, about."""
LEVELS = ("cache", "scheduler")
FOUND = (AssertionError, QuireError)
"""What a check raises. Another error is a defect of its own, and is found all the same."""


class Machine(Protocol):
    """What is driven: `step` does something random, `did` says what, and `cache` counts and checks."""

    cache: FollowedCache
    did: str

    def step(self, choices: Choices, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be. `operation` is the number of the operation in the life of `seed`; `trail` what was
    done until then, the last one last."""

    level: str
    seed: int
    operation: int
    message: str
    trail: tuple[str, ...]

    @property
    def command(self) -> str:
        """What shows it again."""
        return f"quire fuzz --level {self.level} --seed {self.seed} --operations {self.operation} --jobs 1"


@dataclass(slots=True)
class Tally:
    """What was done: operations and seconds of CPU by level, lives, what happened, and a digest of it all."""

    operations: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    digest: int = 0
    violation: Violation | None = None

    def add(self, other: Tally) -> None:
        """Add what another process has done."""
        self.operations.update(other.operations)
        self.seconds.update(other.seconds)
        self.happened.update(other.happened)
        self.lives += other.lives
        self.digest ^= other.digest
        self.violation = self.violation or other.violation


def level_of(seed: int, level: str) -> str:
    """Which level a seed's life is driven on, where `level` may be "both"."""
    return LEVELS[seed % 2] if level == "both" else level


def make_machine(level: str, choices: Choices) -> Machine:
    """A new cache and what drives it."""
    return CacheMachine(choices) if level == "cache" else SchedulerMachine(choices)


def run_life(level: str, seed: int, operations: int, *, trail: int = 12) -> Tally:
    """One life of about that many operations."""
    choices = Choices.seeded(seed)
    started = time.process_time()
    tally = Tally(lives=1)
    did: list[str] = []
    machine: Machine | None = None
    try:
        machine = make_machine(level, choices)
        while machine.cache.operations < operations:
            machine.step(choices)
            did.append(machine.did)
    except Exception as error:
        did.append(machine.did if machine is not None else "make a cache")
        kind = "" if isinstance(error, FOUND) else f"{type(error).__name__}: "
        at = machine.cache.operations + 1 if machine is not None else 1
        tally.violation = Violation(level, seed, at, f"{kind}{error}" or "an assertion", tuple(did[-trail:]))
    tally.seconds[level] = time.process_time() - started
    if machine is not None:
        tally.operations[level] = machine.cache.operations
        tally.happened = machine.cache.happened
        tally.digest = _digest(seed, machine.cache)
    return tally


def run_lives(
    level: str,
    seeds: Callable[[], int],
    *,
    operations: int | None = None,
    seconds: float | None = None,
    inject: str | None = None,
    on_life: Callable[[Tally], None] | None = None,
) -> Tally:
    """Lives of these seeds until something is wrong, or that much was done; with a mutant injected if one is named."""
    total = Tally()
    until = time.monotonic() + seconds if seconds is not None else None
    with injected(inject) if inject is not None else nullcontext():
        while total.violation is None:
            left = LIFE if operations is None else operations - total.operations.total()
            if left <= 0 or (until is not None and time.monotonic() >= until):
                break
            seed = seeds()
            life = run_life(level_of(seed, level), seed, min(LIFE, left))
            total.add(life)
            if on_life is not None:
                on_life(life)
    return total


def level_for(level: str | None, inject: str | None) -> str:
    """The level asked for, or that on which the injected mutant is met, or both."""
    return level or (find(inject).level if inject is not None else "both")


def _digest(seed: int, cache: FollowedCache) -> int:
    """All that was named and all that happened, as a number."""
    told = f"{seed} {cache.operations} {sorted(cache.happened.items())} {sorted(cache.model.cached)}"
    digest = hashlib.sha256(told.encode() + b"".join(cache.names.data[-8:]) + len(cache.names.data).to_bytes(8, "big"))
    return int.from_bytes(digest.digest()[:8], "big")
