"""Events of the cache on the wire: readers who follow them, miss some, or come late know what the tree has."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.observe import kv_publisher
from quire.observe.kv_batch import KvBatches, block_hash
from quire.observe.kv_publisher import KvPublisher
from quire.prefix.evict import eviction_policy
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from tests.waits import SOON_S

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")

PAGE = 4
NAMESPACES = (Namespace(), Namespace(salt="s"), Namespace(adapter="a", salt="t"))


class Reader:
    """Follows a publisher, and folds its events as a router does: which blocks each medium has. `lose` is how many of
    a hundred messages it misses."""

    def __init__(self, publisher: KvPublisher, lose: int = 0, seed: int = 0) -> None:
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.set_hwm(0)
        self._live.connect(publisher.address)
        self._live.subscribe(b"")
        self._asks = self._context.socket(zmq.DEALER)
        self._asks.connect(publisher.replay_address)
        self._lose, self._random = lose, random.Random(seed)
        self.blocks: dict[str, dict[int, dict[str, Any]]] = {}
        self.next = 0
        self.batches: list[list[dict[str, Any]]] = []

    def read(self) -> None:
        """All that has arrived. Asks again for what is missing in between."""
        while self._live.poll(20):
            _, number, payload = self._live.recv_multipart()
            if self._random.randrange(100) < self._lose:
                continue
            sequence = int.from_bytes(number, "big")
            if sequence > self.next:
                self.ask(self.next)
            if sequence == self.next or not self.next:
                self._fold(sequence, payload)

    def ask(self, start: int) -> None:
        """Read the batches from that one on."""
        self._asks.send_multipart((b"", start.to_bytes(8, "big", signed=start < 0)))
        while True:
            empty, topic, number, payload = self._asks.recv_multipart()
            assert (empty, topic) == (b"", b"")
            sequence = int.from_bytes(number, "big", signed=True)
            if sequence < 0:
                assert sequence == -1 and payload == b""
                return
            if sequence >= self.next:
                self._fold(sequence, payload)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _fold(self, sequence: int, payload: bytes) -> None:
        self.next = sequence + 1
        now, events, rank = msgspec.msgpack.decode(payload)
        assert abs(now - time.time()) < 600 and rank == 0
        self.batches.append(events)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            held = self.blocks.setdefault(event["medium"], {})
            if event["type"] == "BlockRemoved":
                for each in event["block_hashes"]:
                    del held[each]
                continue
            above = event["parent_block_hash"]
            for at, each in enumerate(event["block_hashes"]):
                tokens = event["token_ids"][at * PAGE : (at + 1) * PAGE]
                held[each] = {"above": above, "tokens": tokens, "salt": event.get("cache_salt")}
                above = each


def new_tree() -> RadixCache:
    return RadixCache(PAGE, eviction_policy("lru"))


@contextmanager
def published(tree: RadixCache) -> Iterator[KvPublisher]:
    here = "tcp://127.0.0.1:0"
    publisher = KvPublisher(KvBatches(PAGE, tree.names.seed), here, here, lambda: None)
    tree.names.follow(publisher.append)
    try:
        yield publisher
    finally:
        publisher.close()


def in_tree(tree: RadixCache) -> dict[int, dict[str, Any]]:
    """The blocks that a reader should know."""
    found = {}
    for namespace, root in tree.roots.items():
        nodes = [(child, None) for child in root.children.values()]
        for node, above in nodes:  # grows
            tokens = np.frombuffer(node.key, np.int32).reshape(-1, PAGE).tolist()
            hashes = [block_hash(each) for run in node.hashes for each in run.digests]
            for each, own in zip(hashes, tokens, strict=True):
                found[each] = {"above": above, "tokens": own, "salt": namespace.salt or None}
                above = each
            nodes += [(child, above) for child in node.children.values()]
    return found


class Life:
    """Random prompts, evictions and flushes of a small tree."""

    def __init__(self, tree: RadixCache, seed: int) -> None:
        self.tree, self._random, self._pages = tree, random.Random(seed), 0

    def step(self) -> None:
        roll = self._random.randrange(100)
        if roll < 70:
            tokens = np.array([self._random.randrange(2) for _ in range(PAGE * self._random.randrange(1, 6))], np.int32)
            pages = np.arange(self._pages, self._pages + len(tokens) // PAGE, dtype=np.int32)
            self._pages = (self._pages + len(pages)) % 1_000_000
            namespace = self._random.choice(NAMESPACES)
            lease = self.tree.lease(self.tree.match(namespace, tokens))
            rest = lease.num_pages
            self.tree.insert(lease, tokens[rest * PAGE :], pages[rest:])
            self.tree.release(lease)
        elif roll < 98:
            self.tree.evict(self._random.randrange(1, 8))
        else:
            self.tree.flush(self._random.choice(NAMESPACES))


def check_readers(seed: int, steps: int, lose: int) -> None:
    """A reader who loses messages knows after each gap what the tree has."""
    tree = new_tree()
    with published(tree) as publisher:
        life, reader = Life(tree, seed), Reader(publisher, lose, seed)
        try:
            for at in range(steps):
                life.step()
                if publisher.takes_all():
                    tree.tell_all()
                publisher.flush()
                if at % 97 == 0:
                    settle(publisher)
                    reader.read()
            settle(publisher)
            reader.read()
            reader.ask(reader.next)
            assert reader.blocks.get("GPU", {}) == in_tree(tree)
        finally:
            reader.close()


def until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.001)


def settle(publisher: KvPublisher) -> None:
    until(lambda: not publisher.is_due and not publisher.counters().waiting)


@pytest.mark.parametrize(("seed", "lose"), [(0, 0), (1, 30), (2, 90)])
def test_a_reader_knows_what_the_tree_has(seed: int, lose: int) -> None:
    check_readers(seed, 1_500, lose)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_reader_knows_what_the_tree_has_after_a_long_life(seed: int) -> None:
    check_readers(seed, 10_000, 20)


def test_who_comes_late_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "MOST_KEPT", 3)
    tree = new_tree()
    with published(tree) as publisher:
        life = Life(tree, 3)
        for _ in range(50):
            life.step()
            publisher.flush()
            settle(publisher)
        reader = Reader(publisher)
        try:
            reader.ask(0)
            until(lambda: publisher.wants_all)
            assert publisher.takes_all()
            tree.tell_all()
            publisher.flush()
            settle(publisher)
            reader.ask(reader.next)
            assert reader.blocks["GPU"] == in_tree(tree)
        finally:
            reader.close()


def test_events_that_nobody_could_send_are_followed_by_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = new_tree()
    with published(tree) as publisher:
        monkeypatch.setattr(kv_publisher, "MOST_WAITING", 20)
        life = Life(tree, 4)
        for _ in range(200):
            life.step()
        publisher.flush()
        assert publisher.counters().dropped > 20 and publisher.takes_all()
        monkeypatch.undo()
        tree.tell_all()
        publisher.flush()
        settle(publisher)
        reader = Reader(publisher)
        try:
            reader.ask(0)
            assert reader.blocks["GPU"] == in_tree(tree)
        finally:
            reader.close()


def test_messages_without_events_show_a_gap() -> None:
    with published(new_tree()) as publisher:
        publisher.flush()
        reader = Reader(publisher)
        try:
            until(lambda: reader.read() or reader.batches[1:] == [[]])
            assert reader.batches[0] == [{"type": "AllBlocksCleared"}]
        finally:
            reader.close()


def test_a_batch_is_what_vllm_sends() -> None:
    """Field by field, of its 0.32: a map for each event, in an array."""
    tree = new_tree()
    batches = KvBatches(PAGE, tree.names.seed)
    events: list[Any] = []
    tree.names.follow(events.append)
    for namespace in NAMESPACES[:2]:
        lease = tree.lease(tree.match(namespace, np.empty(0, np.int32)))
        tree.insert(lease, np.arange(8, dtype=np.int32), np.array([1, 2], np.int32))
        tree.insert(lease, np.arange(4, dtype=np.int32), np.array([3], np.int32))
        tree.release(lease)
    tree.evict(1)
    _, (plain, more, salted, salted_more, removed), _ = msgspec.msgpack.decode(batches.encode(events))
    assert list(plain) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    ]  # fmt: skip
    assert plain["parent_block_hash"] is None and plain["token_ids"] == list(range(8)) and plain["medium"] == "GPU"
    assert more["parent_block_hash"] == plain["block_hashes"][1] < 2**64
    assert salted["extra_keys"] == [["s"], None] and salted["cache_salt"] == "s"
    assert "extra_keys" not in salted_more and salted_more["cache_salt"] == "s"
    assert set(salted["block_hashes"]).isdisjoint(plain["block_hashes"])
    assert removed == {"type": "BlockRemoved", "block_hashes": more["block_hashes"], "medium": "GPU"}
