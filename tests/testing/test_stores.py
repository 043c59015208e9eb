"""The stores around stores: what passes through is unchanged, and each fault is what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.testing.choices import Choices
from quire.testing.contracts.records import make_keys, make_record, read, write
from quire.testing.contracts.store import StoreContract
from quire.testing.contracts.store_model import StoreModel
from quire.testing.stores import DictStore, Fault, FaultyStore, SlowStore
from quire.testing.stores.wrapped_store import LIES
from quire.tiers.store import Answer, Store, StoreKey
from quire.tiers.stores.directory import DirectoryStore
from tests.tiers.stores.directory_medium import DirectoryMedium


class TestAllOfThemAround(StoreContract):
    """A store that is slow and faulty at a chance of nothing keeps the contract."""

    capacity = 4 << 20

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store"

    def make_store(self, capacity: int | None) -> Store:
        store = SlowStore(DirectoryStore(self.path, capacity), (0.0, 1e-5), bandwidth=1e12)
        return FaultyStore(store, seed=0, percent=0)

    def open_again(self) -> Store:
        return self.make_store(None)

    def medium(self) -> DirectoryMedium:
        return DirectoryMedium(self.path)


class DictMedium:
    """The dictionary of a store."""

    def __init__(self, store: DictStore) -> None:
        self.records = store.visible

    def read(self, key: StoreKey) -> bytes | None:
        return self.records.get(key)

    def write(self, key: StoreKey, record: bytes) -> None:
        self.records[key] = record

    def delete(self, key: StoreKey) -> None:
        del self.records[key]

    def keys(self) -> set[StoreKey]:
        return set(self.records)


class TestDictStore(StoreContract):
    """The smallest store keeps the contract."""

    survives_restart = False
    shared = False

    def make_store(self, capacity: int | None) -> Store:
        self.store = DictStore() if capacity is None else DictStore(capacity)
        return self.store

    def open_again(self) -> Store:
        return self.make_store(self.capacity)

    def medium(self) -> DictMedium:
        return DictMedium(self.store)


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[DirectoryStore]:
    store = DirectoryStore(tmp_path / "store", 4 << 20)
    yield store
    store.close()


@pytest.mark.parametrize("fault", LIES)
def test_a_lie_is_a_wrong_hit(inner: DirectoryStore, fault: Fault) -> None:
    store = FaultyStore(inner, seed=1, kinds=[fault], percent=100)
    keys = make_keys(3)
    records = [make_record(number, 500) for number in range(3)]
    assert write(store, keys, records) == [Answer.HIT] * 3
    found = [read(store, key, 500) for key in keys]
    told = [(said, keys.index(key)) for said, key in store.keys]
    assert [said for said, _ in told] == [fault] * len(told) and store.happened[fault] == len(told) >= 2
    wrong = {number for number, content in enumerate(found) if content != records[number]}
    assert None not in found
    assert wrong == {number for _, number in told}


@pytest.mark.parametrize("fault", LIES)
def test_the_contract_notices_lies(inner: DirectoryStore, fault: Fault) -> None:
    model = StoreModel(FaultyStore(inner, seed=0, kinds=[fault]), sizes=(300, 5000), evicts=True)
    choices = Choices.seeded(0)

    def run() -> None:
        for _ in range(2000):
            model.step(choices)

    with pytest.raises(AssertionError, match="wrong bytes"):
        run()


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault not in LIES])
def test_a_failure_is_no_lie(inner: DirectoryStore, fault: Fault) -> None:
    store = FaultyStore(inner, seed=0, kinds=[fault], percent=30)
    model = StoreModel(store, sizes=(300, 5000), evicts=True)
    choices = Choices.seeded(0)
    for _ in range(300):
        model.step(choices)
    model.check()
    assert store.happened[fault] > 3 and not store.keys


def test_the_same_seed_is_the_same_faults(tmp_path: Path) -> None:
    seen = []
    for turn in range(2):
        store = FaultyStore(DirectoryStore(tmp_path / str(turn), 1 << 20), seed=5, percent=30)
        for number, key in enumerate(make_keys(30)):
            write(store, [key], [make_record(number, 400)])
            read(store, key, 400)
        store.close()
        seen.append((store.happened, store.keys))
    assert seen[0] == seen[1] and len(seen[0][0]) > 6


def test_slowness(inner: DirectoryStore) -> None:
    slept: list[float] = []
    store = SlowStore(inner, (0.5, 1.5), bandwidth=1000.0, seed=3, sleep=slept.append)
    (key,) = make_keys(1)
    assert write(store, [key], [make_record(0, 4000)]) == [Answer.HIT]
    assert store.exists([key]) == [Answer.HIT]
    assert len(slept) == 4
    assert all(0.5 <= seconds <= 1.5 for seconds in (slept[0], slept[1] - 4, slept[2], slept[3]))
