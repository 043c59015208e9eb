"""Running: lives, one after the other, until something is wrong or enough was done; and what is said of it.

A life is one cache of its own plan, made and driven from one seed. Seeds count up from the first one, so that a life
that fails can be run again alone.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.errors import QuireError
from quire.testing.choices import Choices
from tests.fuzz.cache_machine import CacheMachine
from tests.fuzz.followed_cache import FollowedCache
from tests.fuzz.scheduler_machine import SchedulerMachine
from tests.fuzz.tier_faults import FAULTS
from tests.fuzz.tier_world import TierAsk
from tests.fuzz.tiered_cache import TieredCache
from tests.fuzz.tiered_machine import TieredMachine
from tests.fuzz.tiered_scheduler import TieredSchedulerMachine
from tests.mutants import find, injected

LIFE = 600
"""Operations of one life, about."""
TIERED_LIFE = 150
"""The same of one with tiers, which takes longer to come to rest than to go on."""
LEVELS = ("cache", "scheduler")
NO_FAULTS = TierAsk()
FOUND = (AssertionError, QuireError)
"""What a check raises. Another error is a violation too, but of code that has just failed."""


class Machine(Protocol):
    """What is driven: `step` does something random, `did` is what, which `tell` puts in words; `cache` checks, and
    `end` lets everything come to its end."""

    @property
    def cache(self) -> FollowedCache: ...

    @property
    def did(self) -> tuple[Any, ...]: ...

    def step(self, choices: Choices, /) -> object: ...

    def tell(self, did: tuple[Any, ...], /) -> str: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be. `operation` is the number of the operation in the life of `seed`; `trail` what was
    done until then, the last one last. `by_check` says whether a check found it; else the code has just failed."""

    level: str
    seed: int
    operation: int
    message: str
    trail: tuple[str, ...]
    by_check: bool = True
    ask: TierAsk = NO_FAULTS

    @property
    def command(self) -> str:
        """What shows it again."""
        again = f"python -m tests.fuzz --level {self.level} --seed {self.seed} --operations {self.operation} --jobs 1"
        if self.ask.storage is not None:
            again += f" --tiers device,host{',storage' if self.ask.storage else ''}"
        return again + (f" --inject {','.join(self.ask.faults)}" if self.ask.faults else "")


@dataclass(slots=True)
class Tally:
    """What was done: operations and seconds of CPU by level, lives, what happened, and a digest of it all.

    `met` counts faults that checks have met, with the name that each gave it. `wall` is how many seconds it took, the
    start of processes left out.
    """

    operations: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    digest: int = 0
    wall: float = 0.0
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    violation: Violation | None = None

    def add(self, other: Tally) -> None:
        """Add what another process has done."""
        self.operations.update(other.operations)
        for level, seconds in other.seconds.items():
            self.seconds[level] = self.seconds.get(level, 0.0) + seconds
        self.happened.update(other.happened)
        self.met.update(other.met)
        self.lives += other.lives
        self.digest ^= other.digest
        self.wall = max(self.wall, other.wall)
        self.violation = self.violation or other.violation


def level_of(seed: int, level: str) -> str:
    """Which level a seed's life is driven on, where `level` may be "both"."""
    return LEVELS[seed % 2] if level == "both" else level


def make_machine(level: str, choices: Choices, ask: TierAsk = NO_FAULTS) -> Machine:
    """A new cache and what drives it."""
    if level == "tiers":
        return TieredMachine(choices, ask) if choices.chance(60) else TieredSchedulerMachine(choices, ask)
    return CacheMachine(choices) if level == "cache" else SchedulerMachine(choices)


def run_life(level: str, seed: int, operations: int, *, trail: int = 12, ask: TierAsk = NO_FAULTS) -> Tally:
    """One life of about that many operations, and its end."""
    choices = Choices.seeded(seed)
    started = time.process_time()
    tally = Tally(lives=1)
    done: deque[tuple[Any, ...]] = deque(maxlen=trail - 1)
    machine: Machine | None = None
    at = 0
    try:
        machine = make_machine(level, choices, ask)
        while machine.cache.operations < operations:
            machine.step(choices)
            done.append(machine.did)
        at = machine.cache.operations
        machine.end()
    except Exception as error:
        told = [machine.tell(did) for did in (*done, machine.did)] if machine is not None else ["make a cache"]
        by_check = isinstance(error, FOUND)
        message = str(error) if by_check else f"{type(error).__name__}: {error}"
        at = at or (machine.cache.operations + 1 if machine is not None else 1)
        tally.violation = Violation(level, seed, at, message or "an assertion", tuple(told), by_check, ask)
    tally.seconds[level] = time.process_time() - started
    if machine is not None:
        tally.operations[level] = machine.cache.operations
        tally.happened = machine.cache.happened
        tally.digest = _digest(seed, machine.cache)
        if isinstance(machine.cache, TieredCache):
            world = machine.cache.world
            tally.met = world.records.met
            tally.happened.update(world.injected())
    return tally


def run_lives(
    level: str,
    seeds: Callable[[], int],
    *,
    operations: int | None = None,
    seconds: float | None = None,
    lives: int | None = None,
    inject: str | None = None,
    ask: TierAsk = NO_FAULTS,
    on_life: Callable[[Tally], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Tally:
    """Lives of these seeds until something is wrong, that much was done or it is stopped; with a mutant if named, and
    faults and tiers as asked for.

    `on_life` hears of each life. Raises InvalidInput for a mutant that is not known.
    """
    total = Tally()
    level = level_for(level, inject)
    if inject is not None and level == "tiers" and not ask.faults:
        ask = TierAsk(ask.storage, FAULTS, spared=40)
    started = time.monotonic()
    until = started + seconds if seconds is not None else None
    with injected(inject) if inject is not None else nullcontext():
        while total.violation is None and not stopped():
            left = LIFE if operations is None else operations - total.operations.total()
            if left <= 0 or total.lives == lives or (until is not None and time.monotonic() >= until):
                break
            seed = seeds()
            longest = TIERED_LIFE if level == "tiers" else LIFE
            life = run_life(level_of(seed, level), seed, min(longest, left), ask=ask)
            if inject is not None and life.violation is not None and not life.violation.by_check:
                life.violation = None  # broken code that only fails shows nothing of the checks
            total.add(life)
            if on_life is not None:
                on_life(life)
    total.wall = time.monotonic() - started
    return total


def level_for(level: str, inject: str | None) -> str:
    """That level, or for "both" the one on which the injected mutant is met. Raises InvalidInput for an unknown one."""
    if inject is None:
        return level
    needed = find(inject).level
    return needed if level == "both" else level


def _digest(seed: int, cache: FollowedCache) -> int:
    """All that was named and all that happened, as a number."""
    told = f"{seed} {cache.operations} {sorted(cache.happened.items())} {sorted(cache.model.cached)}"
    digest = hashlib.sha256(told.encode() + b"".join(cache.names.data[-8:]) + len(cache.names.data).to_bytes(8, "big"))
    return int.from_bytes(digest.digest()[:8], "big")
