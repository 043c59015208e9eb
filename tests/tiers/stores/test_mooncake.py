"""MooncakeStore on a real master and a storage node: the contract, and what happens when either dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.errors import StoreError
from quire.testing.contracts.records import make_key, make_keys, make_record, read, write
from quire.testing.contracts.store import StoreContract
from quire.tiers.store import Answer, StoreKey
from quire.tiers.stores import mooncake as mooncake_store
from tests.changes import STORES, unless_changed
from tests.tiers.stores.server_cases import check_first_stays, kill_while_written, read_right
from tests.tiers.stores.servers import NotHere, Server, free_port, mooncake, mooncake_master, mooncake_node

try:
    mooncake_master()
except NotHere as reason:
    pytest.skip(f"{reason}; `pip install 'quire[mooncake]'` brings it", allow_module_level=True)

HIT, MISS, PENDING, RETRY = Answer.HIT, Answer.MISS, Answer.PENDING, Answer.RETRY
pytestmark = unless_changed(__name__, *STORES)

MIB = 1 << 20
POOL_BYTES = 128 * MIB


class Pool:
    """A master and a node on this machine."""

    def __init__(self, directory: Path) -> None:
        self.port, self.metrics = free_port(), free_port()
        self._ready = directory / "ready"
        self.master: Server = mooncake(self.port, self.metrics)
        self.node: Server | None = None

    def start(self) -> None:
        self.master.start()
        self.add_node()

    def add_node(self) -> None:
        self.node = mooncake_node(self.port, POOL_BYTES, self._ready)
        self.node.start()

    def close(self) -> None:
        if self.node is not None:
            self.node.close()
        self.master.close()

    def open_store(self, **options: object) -> mooncake_store.MooncakeStore:
        more = "".join(f"&{name}={value}" for name, value in {"bounce": "16MiB", **options}.items())
        return mooncake_store.open(f"mooncake://127.0.0.1:{self.port}?metrics={self.metrics}{more}")


@contextmanager
def running(directory: Path) -> Iterator[Pool]:
    """A pool for the block."""
    pool = Pool(directory)
    try:
        pool.start()
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One for all tests that leave it as it is; each of them uses it empty."""
    with running(tmp_path_factory.mktemp("mooncake")) as pool:
        yield pool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """One to break."""
    with running(tmp_path) as own:
        yield own


class MooncakeMedium:
    """The pool by a client of its own, and by its simplest verbs."""

    def __init__(self, client: Any, store: mooncake_store.MooncakeStore) -> None:
        self._client = client
        self._store = store

    def read(self, key: StoreKey) -> bytes | None:
        content: bytes = self._client.get(f"quire/{key}")
        return content or None

    def write(self, key: StoreKey, record: bytes) -> None:
        self.delete(key)
        assert self._client.put(f"quire/{key}", record) == 0

    def delete(self, key: StoreKey) -> None:
        assert self._client.remove(f"quire/{key}", True) == 0

    def keys(self) -> set[StoreKey]:
        return {entry.key for entry in self._store.entries()}


class TestMooncake(StoreContract):
    """The contract, on one pool for all its tests, emptied for each."""

    bounded = False
    exclusive = False

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, shared_pool: Pool) -> Iterator[Any]:
        from mooncake.store import MooncakeDistributedStore

        client = MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB * 16, "tcp", "", f"127.0.0.1:{shared_pool.port}") == 0
        yield client
        client.close()

    @pytest.fixture(autouse=True)
    def place(self, shared_pool: Pool, client: Any) -> None:
        self.pool, self.client = shared_pool, client

    def make_store(self, capacity: int | None) -> mooncake_store.MooncakeStore:
        self.client.remove_all(True)
        self.made = self.open_again()
        return self.made

    def open_again(self) -> mooncake_store.MooncakeStore:
        return self.pool.open_store()

    def medium(self) -> MooncakeMedium:
        return MooncakeMedium(self.client, self.made)


# -- a master or a node that dies


def test_a_master_killed_while_it_is_written_to(pool: Pool) -> None:
    """It drops everything; nothing wrong is read, calls soon come back at once, and it is found again."""
    store, size = pool.open_store(timeout=1), 100_000
    keys = make_keys(800)
    kill_while_written(pool.master, store, keys, size, least=40)
    assert sum(store.failures.values()) >= 1
    pool.master.start()
    give_up = time.monotonic() + 60
    while write(store, keys[-1:], [make_record(799, size)]) != [HIT]:
        assert time.monotonic() < give_up, "the new master is not found"
        time.sleep(0.1)
    read_right(store, keys[:40], size)
    assert read(store, keys[-1], size) == make_record(799, size)
    store.close()


def test_a_node_that_dies(pool: Pool) -> None:
    """Its records are gone: not a hit, and nothing hangs."""
    store, size = pool.open_store(timeout=1), 100_000
    keys = make_keys(8)
    assert write(store, keys, [make_record(number, size) for number in range(8)]) == [HIT] * 8
    assert pool.node is not None
    pool.node.kill()
    assert HIT not in store.get(keys, [bytearray(size) for _ in keys])
    store.remove(keys)
    pool.node.close()
    pool.add_node()
    give_up = time.monotonic() + 60
    while write(store, keys[:1], [make_record(0, size)]) != [HIT]:
        assert time.monotonic() < give_up, "the new node is not found"
        store.remove(keys[:1])
    store.close()


def test_a_full_pool_evicts(shared_pool: Pool) -> None:
    """Three times what fits: nearly all is taken, what is still there is right and among the newer half."""
    store, size = shared_pool.open_store(), MIB
    keys = make_keys(384)
    answers: list[Answer] = []
    for start in range(0, 384, 8):
        records = [make_record(number % 7, size) for number in range(start, start + 8)]
        answers += write(store, keys[start : start + 8], records)
    assert set(answers) <= {HIT, RETRY} and answers.count(HIT) > 300
    found = [number for number, key in enumerate(keys) if read(store, key, size) == make_record(number % 7, size)]
    assert 60 <= len(found) <= 128
    assert sum(found) / len(found) > 192, "it kept the old ones"
    store.remove(keys)
    store.close()


# -- what the library does not tell


def test_a_record_that_was_just_read_is_removed(shared_pool: Pool) -> None:
    store, key = shared_pool.open_store(), make_key(0)
    assert write(store, [key], [make_record(0, 900)]) == [HIT]
    assert read(store, key, 900) is not None
    assert store._client.remove(f"quire/{key}") == -706, "it has no lease"
    assert store.remove([key]) == 1
    assert store.exists([key]) == [MISS]
    store.close()


def test_a_key_twice_in_one_read(shared_pool: Pool) -> None:
    """The library fills one of the two buffers and says that it filled both."""
    store, keys, size = shared_pool.open_store(), make_keys(2), 9000
    records = [make_record(number, size) for number in range(2)]
    assert write(store, keys, records) == [HIT, HIT]
    order = [0, 1, 0, 0, 1]
    for others in ([1, 1, 1, 1, 1], order):
        buffers = [bytearray(size) for _ in others]
        assert store.get([keys[number] for number in others], buffers) == [HIT] * 5
        assert buffers == [records[number] for number in others]
    assert store.remove(keys) == 2
    store.close()


def test_of_two_writers_the_first_stays(shared_pool: Pool) -> None:
    check_first_stays(shared_pool.open_store(), shared_pool.open_store(), 9000)


def test_fewer_replicas_than_asked_for_are_counted(shared_pool: Pool) -> None:
    store, key = shared_pool.open_store(replicas=2), make_key(0)
    assert write(store, [key], [make_record(0, 900)]) == [HIT]
    assert store.failures["replicas"] == 1
    assert store.remove([key]) == 1
    store.close()


def test_a_record_longer_than_its_memory(shared_pool: Pool) -> None:
    store, keys = shared_pool.open_store(bounce="2MiB"), make_keys(2)
    assert store.prepare(keys, [MIB, MIB + 1]) == [MISS, RETRY]
    assert store.put(keys[:1], [make_record(0, MIB)]) == store.complete(keys[:1], [True]) == [HIT]
    assert read(store, keys[0], MIB) == make_record(0, MIB)
    assert store.get(keys, [bytearray(MIB), bytearray(MIB + 1)]) == [HIT, RETRY]
    assert store.remove(keys) == 1
    store.close()


def test_memory_of_this_process_joins_the_pool(pool: Pool) -> None:
    """And leaves it again."""
    assert pool.node is not None
    pool.node.kill()
    keys, size = make_keys(4), 10_000
    giving = mooncake_store.open(f"mooncake://127.0.0.1:{pool.port}", 64 * MIB)
    taking = pool.open_store()
    give_up = time.monotonic() + 60  # the dead node is offered room for a while
    while HIT not in (answers := write(taking, keys, [make_record(number, size) for number in range(4)])):
        assert time.monotonic() < give_up, answers
        time.sleep(0.2)
    for number, (key, answer) in enumerate(zip(keys, answers, strict=True)):
        if answer is HIT:
            assert read(giving, key, size) == make_record(number, size)
    giving.close()
    assert HIT not in taking.get(keys, [bytearray(size) for _ in keys])
    taking.close()


def test_closing_waits_for_calls(shared_pool: Pool) -> None:
    """The library ends the process when it is called after its end."""
    store, keys = shared_pool.open_store(), make_keys(64)
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(store.exists, keys) for _ in range(300)]
        time.sleep(0.005)
        store.close()
        assert {answer for call in calls for answer in call.result()} <= {MISS, RETRY}
    assert store.exists(keys) == [RETRY] * 64


# -- opening


def test_no_server() -> None:
    with pytest.raises(StoreError, match="cannot be reached"):
        mooncake_store.open(f"mooncake://127.0.0.1:{free_port()}")
