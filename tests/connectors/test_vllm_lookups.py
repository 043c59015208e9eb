"""Lookups in the background: one batch per step, answers that stay, and a store that hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from threading import Event

import pytest

from quire.connectors.vllm.lookups import Lookups
from tests.waits import SOON_S

KEYS = [bytes([number]) * 36 for number in range(4)]


class AskedStore:
    """A store that has the first two keys, and answers while `is_open`."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.is_open = Event()
        self.is_open.set()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self.batches.append(list(keys))
        assert self.is_open.wait(SOON_S)
        return [key in KEYS[:2] for key in keys]


@pytest.fixture
def store() -> Iterator[AskedStore]:
    store = AskedStore()
    yield store
    store.is_open.set()


@pytest.fixture
def lookups(store: AskedStore) -> Iterator[Lookups]:
    lookups = Lookups(store.exists, deadline_s=0.2)
    yield lookups
    store.is_open.set()
    lookups.close(5)


def answers(lookups: Lookups, request: str, keys: Sequence[bytes] = KEYS) -> list[bool | None]:
    return [lookups.of(request, key) for key in keys]


def until_answered(lookups: Lookups, request: str, keys: Sequence[bytes] = KEYS) -> list[bool | None]:
    end = time.monotonic() + SOON_S
    while None in answers(lookups, request, keys) and time.monotonic() < end:
        lookups.flush()
        time.sleep(0.001)
    lookups.flush()
    return answers(lookups, request, keys)


def test_a_step_is_one_batch_for_all_requests(lookups: Lookups, store: AskedStore) -> None:
    assert answers(lookups, "one", KEYS[:3]) + answers(lookups, "two", KEYS[1:]) == [None] * 6
    lookups.flush()
    assert until_answered(lookups, "one", KEYS[:3]) == [True, True, False]
    assert until_answered(lookups, "two", KEYS[1:]) == [True, False, False]
    assert store.batches == [KEYS]
    assert lookups.counts == {"misses": 3}
    assert dict(lookups.end("one")[1]) == {KEYS[0]: True, KEYS[1]: True, KEYS[2]: False}
    assert answers(lookups, "one", KEYS[:1]) == [None]  # a later request asks anew


def test_what_could_not_be_loaded_is_missing_for_its_request(lookups: Lookups) -> None:
    until_answered(lookups, "one")
    until_answered(lookups, "two")
    lookups.miss("one", KEYS[:1])
    lookups.miss("none", KEYS[:1])
    assert answers(lookups, "one") == [False, True, False, False]
    assert answers(lookups, "two") == [True, True, False, False]


def test_a_store_that_hangs_costs_one_deadline(lookups: Lookups, store: AskedStore) -> None:
    store.is_open.clear()
    began = time.monotonic()
    assert until_answered(lookups, "one") == [False] * 4
    assert 0.2 <= time.monotonic() - began < 2
    assert answers(lookups, "two") == [False] * 4  # at once
    assert lookups.counts["expired"] == 8
    lookups.flush()
    assert len(store.batches) == 1
    store.is_open.set()
    end = time.monotonic() + SOON_S
    while lookups.are_late and time.monotonic() < end:
        lookups.flush()
    assert answers(lookups, "one") == [False] * 4  # what was said stays
    assert until_answered(lookups, "three") == [True, True, False, False]


def test_late_batches_are_looked_at_once(lookups: Lookups, store: AskedStore) -> None:
    """A step costs nothing for keys that were late before."""
    store.is_open.clear()
    for number in range(5):
        lookups.of(str(number), KEYS[0])
        lookups.flush()
    time.sleep(0.3)
    lookups.flush()
    assert [len(batch.asked) for batch in lookups._batches] == [0]
    assert lookups.counts["expired"] == 5
    store.is_open.set()
    end = time.monotonic() + SOON_S
    while lookups.are_late and time.monotonic() < end:
        lookups.flush()
    assert until_answered(lookups, "new") == [True, True, False, False]


def test_a_store_that_raises_misses_once() -> None:
    raised = [OSError("the disk is on fire")]

    def exists(keys: Sequence[bytes]) -> list[bool]:
        if raised:
            raise raised.pop()
        return [True] * len(keys)

    lookups = Lookups(exists, deadline_s=5)
    assert until_answered(lookups, "one") == [False] * 4
    assert until_answered(lookups, "two") == [True] * 4
    lookups.close(5)
