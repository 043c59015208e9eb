"""Fuzzing as a whole: runs, processes, what is said of a violation, and how it is made short."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count

import numpy as np
import pytest

from quire.cache import KVCache
from quire.errors import InvalidInput, OutOfPages
from quire.testing.choices import Choices
from quire.testing.plans import small_plan
from tests.changes import slow_unless_changed
from tests.fuzz.faults import Faults
from tests.fuzz.parallel import Task, fuzz
from tests.fuzz.run import Tally, level_of, run_life, run_lives
from tests.fuzz.shorten import shorten
from tests.mutants import MUTANTS, injected

DIGEST = """
from itertools import count
from tests.fuzz.run import run_lives
print(run_lives("both", count(3).__next__, operations=1500).digest)
"""


def lives(level: str = "both", seed: int = 0, operations: int = 1500, inject: str | None = None) -> Tally:
    return run_lives(level, count(seed).__next__, operations=operations, inject=inject)


@pytest.mark.parametrize("level", ["cache", "scheduler"])
def test_a_short_run_finds_nothing(level: str) -> None:
    found = lives(level, seed=500, operations=6_000)
    assert found.violation is None
    assert found.operations.total() == found.operations[level] >= 6_000
    assert found.happened["hit"] and found.happened["evicted"]
    if level == "scheduler":
        rare = [name for name in ("accepted", "rejected", "moved") if not found.happened[name]]
        assert not rare, f"never happened to drafts, so this run shows little: {rare}"


def test_both_levels_take_turns() -> None:
    found = lives()
    assert set(found.operations) == {"cache", "scheduler"} == {level_of(seed, "both") for seed in (0, 1)}
    assert found.lives == 3


@slow_unless_changed("src/quire/testing/", "tests/fuzz/")
def test_the_same_seed_does_the_same_in_any_process() -> None:
    found = lives(seed=3)
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(done.stdout) == found.digest
    assert lives(seed=4).digest != found.digest


@pytest.mark.slow
def test_two_processes_share_the_seeds() -> None:
    heard: list[int] = []
    found = fuzz(Task("cache", 10, 2, operations=2_400), lambda tally: heard.append(tally.lives))
    alone = Tally()
    for first in (10, 11):
        alone.add(run_lives("cache", count(first, 2).__next__, operations=1_200))
    assert found.violation is None
    assert (found.lives, found.digest, found.happened) == (alone.lives, alone.digest, alone.happened)
    assert heard == list(range(1, found.lives + 1))


def test_a_violation_is_met_again_by_its_seed() -> None:
    found = lives(inject="duplicates-leak").violation
    assert found is not None and found.by_check
    assert "no owner" in found.message and found.trail
    with injected("duplicates-leak"):
        again = run_life(found.level, found.seed, found.operation).violation
    assert again == found
    assert f"--seed {found.seed} --operations {found.operation}" in found.command
    assert run_life(found.level, found.seed, found.operation).violation is None, "the mutant was not taken back"


def test_a_process_that_finds_something_stops_the_others() -> None:
    found = fuzz(Task("both", 0, 2, operations=200_000, inject="free-before-fence"), lambda tally: None)
    assert found.violation is not None
    assert found.operations.total() < 20_000


@pytest.mark.slow
def test_a_violation_is_made_short() -> None:
    with injected("duplicates-leak"):
        found = lives().violation
        assert found is not None
        short = shorten(found, seconds=200)
    assert 0 < len(short) < found.operation // 4
    assert "no owner" in short[-1]


def test_a_mutant_that_is_not_known() -> None:
    with pytest.raises(InvalidInput, match="free-before-fence"):
        lives(inject="free-after-fence")


def test_every_mutant_says_what_it_breaks_and_who_had_it() -> None:
    assert len(MUTANTS) > 50
    for made in MUTANTS.values():
        assert made.wrong.endswith(".") and "#" in made.field


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_allocation_that_fails_in_any_group_changes_nothing(at: int) -> None:
    cache = KVCache(small_plan(8, 2, groups=("a", "b")))
    faults = Faults(cache)
    kv = cache.begin(np.arange(6, dtype=np.int32))
    before = cache.statistics()
    faults.arm(Choices(lambda n: at - 1))
    with pytest.raises(OutOfPages) as caught:
        cache.extend([kv], [6])
    assert faults.take(caught.value)
    cache.audit()
    assert cache.statistics() == before
    assert not cache.rows.allocated(kv)
    cache.extend([kv], [6])
    cache.audit()
