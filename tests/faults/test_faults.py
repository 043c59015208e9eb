"""Faults of processes: two runs by default, 1,000 with `slow`; and what the driver takes for a fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests import changes
from tests.changes import slow_unless_changed
from tests.faults.cases import LOADS, MOMENTS, SIGNALS, TIERS, case
from tests.faults.clients import SLACK_S, Client, Load, Told, wrong
from tests.faults.run import Matrix

SEED = 0
EXPECTED = [5, 6, 7]


def numbers(count: int, *wanted: tuple[str, str]) -> list[int]:
    """The first run with the disk tier of each process and signal that is wanted, up to `count`."""
    found = {}
    for number in range(2000):
        this = case(SEED, number)
        if this.tier == "disk" and (this.process, this.signal) in wanted:
            found.setdefault((this.process, this.signal), number)
    return sorted(found.values())[:count]


@slow_unless_changed("src/quire/engine/", "src/quire/client/", "src/quire/serve/", *changes.TIERS, "tests/faults/")
def test_two_runs() -> None:
    wanted = [("engine", "KILL"), ("front", "STOP")]
    with Matrix(SEED) as matrix:
        for number in numbers(2, *wanted):
            matrix.run(number)
    assert not matrix.faults, "\n".join(matrix.faults)
    assert matrix.report()["clients_told"].get("answered"), "none was answered"


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_thousand() -> None:
    with Matrix(SEED, cluster_every=25) as matrix:
        for number in range(1000):
            matrix.run(number)
            assert len(matrix.faults) < 5, "\n".join(matrix.faults)
    assert not matrix.faults, "\n".join(matrix.faults)


def test_cases_cover_the_matrix() -> None:
    """A thousand of them have all that they are made of, in each tier; a number gives the same case again."""
    made = [case(SEED, number, cluster_every=25) for number in range(1000)]
    assert made == [case(SEED, number, cluster_every=25) for number in range(1000)]
    single = [each for each in made if each.target != "cluster"]
    for tier in TIERS:
        seen = {(each.process, each.signal, each.moment) for each in single if each.tier == tier}
        assert len(seen) == len(SIGNALS) * (2 * len(MOMENTS) - 1), "processes, signals and moments"
    assert {(each.signal, each.load) for each in single} == {(name, load) for name in SIGNALS for load in LOADS}
    assert len({each.process for each in made if each.target == "cluster"}) == 5


def client(told: Told, deadline_s: float = 1.0) -> Client:
    load = Load(1, "one", random.Random(1))
    load.clients[0].told, load.clients[0].deadline_s = told, deadline_s
    return load.clients[0]


def told(**fields: Any) -> Callable[[], Told]:
    return lambda: Told(**{"status": 200} | fields)


FAULTS = {
    "another token": told(kind="answered", tokens=[5, 6, 8]),
    "fewer tokens": told(kind="answered", tokens=[5, 6]),
    "another token before an error": told(kind="failed", tokens=[6], error={"code": "QUIRE-ENGINE-01"}),
    "silence": told(kind="silent"),
    "a closed connection": told(kind="closed"),
    "an error of ours that no fault explains": told(kind="refused", status=500, error={"code": "QUIRE-AUDIT-01"}),
    "an error without a code": told(kind="failed", error={"message": "it failed"}),
    "a late answer": told(kind="answered", tokens=EXPECTED, seconds=SLACK_S + 2),
    "a late error": told(kind="refused", status=408, error={"code": "QUIRE-SERVE-04"}, seconds=SLACK_S + 2),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_a_client_may_not_be_told(what: str) -> None:
    assert wrong(client(FAULTS[what]()), EXPECTED, may_close=False)


@pytest.mark.parametrize(
    ("made", "may_close"),
    [
        (told(kind="answered", tokens=EXPECTED, seconds=0.5), False),
        (told(kind="failed", tokens=[5], error={"code": "QUIRE-ENGINE-01"}), False),
        (told(kind="refused", status=503, error={"code": "QUIRE-ENGINE-01"}), False),
        (told(kind="refused", status=408, error={"code": "QUIRE-SERVE-04"}), False),
        (told(kind="left"), False),
        (told(kind="closed", tokens=[5]), True),
    ],
)
def test_what_a_client_may_be_told(made: Callable[[], Told], may_close: bool) -> None:
    assert wrong(client(made()), EXPECTED, may_close=may_close) is None
