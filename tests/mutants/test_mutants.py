"""Every mutant must be noticed by the check it names, within a bounded and repeatable run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from quire.errors import QuireError
from quire.plan import planner
from tests.cache.machine import run_cache
from tests.kernels.stored_case import FORMATS, check_stored
from tests.memory.machine import run_allocator
from tests.mutants.mutants import MUTANTS, Mutant
from tests.plan.check import check_plan
from tests.prefix.test_evict import check_eviction_orders
from tests.scheduler.machine import run_scheduler

NOTICED = (AssertionError, QuireError, pytest.fail.Exception)
"""What a check raises. A mutant that ends in another error has only become invalid code."""

RUNS: dict[str, Iterable[Callable[[], object]]] = {
    "cache": [lambda seed=seed: run_cache(seed, 150) for seed in range(20)],
    "allocators": [lambda seed=seed: run_allocator(seed, 60) for seed in range(20)],
    "scheduler": [lambda seed=seed: run_scheduler(seed) for seed in range(30)],
    "policies": [check_eviction_orders],
    "stored": [lambda seed=seed: check_stored(seed) for seed in range(2 * len(FORMATS))],
    "planner": [lambda seed=seed: check_plan(seed) for seed in range(300)],
}


@pytest.fixture(autouse=True)
def _no_groups_of_other_mutants() -> Iterator[None]:
    """The planner remembers the groups of models; those of a mutant must not be met by the next."""
    planner._cached_groups.cache_clear()
    yield
    planner._cached_groups.cache_clear()


def noticed(killer: str) -> bool:
    for run in RUNS[killer]:
        try:
            run()
        except NOTICED:
            return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    assert noticed(mutant.killer), f"nobody noticed that {mutant.wrong}"


@pytest.mark.parametrize("killer", RUNS)
def test_without_a_mutant_all_is_well(killer: str) -> None:
    for run in list(RUNS[killer])[:5]:
        run()


def test_names_and_sentences_are_all_different() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len({mutant.wrong for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.killer for mutant in MUTANTS} == set(RUNS)
