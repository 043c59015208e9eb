"""Lookups in the background: one batch per step, answers that stay, and a store that hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from threading import Event

import pytest

from quire.connectors.checked_store import CheckedStore, ChunkKey
from quire.connectors.job import Job
from quire.connectors.vllm.lookups import Lookups
from quire.testing.stores.dict_store import DictStore
from quire.tiers.store import Answer, StoreKey
from tests.connectors.test_checked_store import FACTS, SIZES, payload
from tests.waits import SOON_S

KEYS = [bytes([number]) * 36 for number in range(4)]
DEADLINE_S = 0.2


def name_of(key: bytes) -> ChunkKey:
    return key[:32], 0


class AskedStore(DictStore):
    """It answers while `is_open`."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[bytes]] = []
        self.is_open = Event()
        self.is_open.set()

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        self.batches.append([key.page[:1] * 36 for key in keys[:-2]])  # the last two are tombstones
        assert self.is_open.wait(SOON_S)
        return super().exists(keys)


@pytest.fixture
def store() -> Iterator[AskedStore]:
    store = AskedStore()
    yield store
    store.is_open.set()


@pytest.fixture
def checked(store: AskedStore) -> Iterator[CheckedStore]:
    """It has the first two keys."""
    checked = CheckedStore(store, FACTS, SIZES, deadline_s=DEADLINE_S)
    assert checked.save([name_of(key) for key in KEYS[:2]], [payload(0)] * 2) == [Answer.HIT] * 2
    store.batches.clear()
    yield checked
    store.is_open.set()
    checked.close()


@pytest.fixture
def lookups(checked: CheckedStore) -> Lookups:
    return Lookups(lambda keys: checked.submit_exists(keys, name_of))


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
    assert lookups.num_missed == 3
    assert dict(lookups.end("one")[1]) == {KEYS[0]: Answer.HIT, KEYS[1]: Answer.HIT, KEYS[2]: Answer.MISS}
    assert answers(lookups, "one", KEYS[:1]) == [None]  # a later request asks anew


def test_what_could_not_be_loaded_is_missing_for_its_request(lookups: Lookups) -> None:
    until_answered(lookups, "one")
    until_answered(lookups, "two")
    lookups.loaded("one", {KEYS[0]: Answer.RETRY})
    lookups.loaded("none", {KEYS[0]: Answer.MISS})
    assert answers(lookups, "one") == [False, True, False, False]
    assert answers(lookups, "two") == [True, True, False, False]
    assert lookups.end("one")[1][KEYS[0]] is Answer.RETRY and lookups.end("two")[1][KEYS[0]] is Answer.HIT


def test_a_store_that_hangs_costs_one_deadline(lookups: Lookups, checked: CheckedStore, store: AskedStore) -> None:
    store.is_open.clear()
    began = time.monotonic()
    assert until_answered(lookups, "one") == [False] * 4
    assert DEADLINE_S <= time.monotonic() - began < 2
    assert answers(lookups, "two") == [None] * 4
    lookups.flush()
    assert answers(lookups, "two") == [False] * 4, "in the same step"
    assert checked.counts["expired"] == 8 and len(store.batches) == 1
    assert lookups.num_missed == 0 and set(lookups.end("two")[1].values()) == {Answer.RETRY}, "it has not said so"
    store.is_open.set()
    end = time.monotonic() + SOON_S
    while checked._askers.hang and time.monotonic() < end:
        time.sleep(0.001)
    checked._askers.rest._until = 0.0
    assert checked.counts["refused"] == 0, "each lookup is counted once"
    assert answers(lookups, "one") == [False] * 4  # what was said stays
    assert until_answered(lookups, "three") == [True, True, False, False]


def test_no_step_waits_for_a_store_that_hangs(lookups: Lookups, store: AskedStore) -> None:
    """Neither the steps before the deadline nor those after: all of them end though the store never answers."""
    store.is_open.clear()
    keys = [number.to_bytes(36, "big") for number in range(1000)]
    number, end = 0, time.monotonic() + 2 * DEADLINE_S
    while time.monotonic() < end:
        answers(lookups, str(number), keys)
        lookups.flush()
        number += 1
    assert answers(lookups, "0", keys) == answers(lookups, str(number - 1), keys) == [False] * 1000
    assert len(store.batches) <= 2, "one for each thread"


def test_late_answers_change_nothing() -> None:
    jobs: list[Job] = []

    def submit(keys: Sequence[bytes]) -> Job:
        jobs.append(Job(lambda job: None, len(keys), 0.0))
        return jobs[-1]

    lookups = Lookups(submit)
    assert answers(lookups, "one") == [None] * 4
    lookups.flush()
    assert not jobs[0].tell(dict.fromkeys(range(4), Answer.HIT))
    lookups.flush()
    assert answers(lookups, "one") == [False] * 4 and lookups.num_missed == 0
