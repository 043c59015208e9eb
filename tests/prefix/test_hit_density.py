"""HitDensity: its table against hand-made records, and what it learns in a small tree against LRU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quire.prefix.evict import eviction_policy
from quire.prefix.hit_density import AGES, ANSWERS, KINDS, RUNS, HitDensity, worth
from quire.prefix.node import Node
from quire.prefix.policy import EvictionPolicy
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace

NAMESPACE = Namespace()


def age(ticks: int) -> int:
    return int(np.searchsorted(AGES, ticks, side="right")) - 1


def test_with_no_record_the_older_is_worth_less() -> None:
    table = worth(np.zeros(KINDS), np.zeros((KINDS, len(AGES))))
    assert (np.diff(table[:, age(16) :], axis=1) < 0).all(), "not LRU at the start"
    assert (table == table[0]).all()


def test_a_leaf_is_worth_most_shortly_before_its_kind_returns() -> None:
    begun, reused = np.zeros(KINDS), np.zeros((KINDS, len(AGES)))
    begun[0], reused[0, age(100)] = 1_000, 900
    table = worth(begun, reused)[0]
    assert table[age(20)] < table[age(50)] < table[age(90)], "worth does not rise towards the return"
    assert table[age(200)] < table[age(20)] / 10, "what missed its time is kept"


def test_what_returns_more_often_is_worth_more_at_every_age_and_relatives_lend_their_record() -> None:
    begun, reused = np.zeros(KINDS), np.zeros((KINDS, len(AGES)))
    for kind, part in ((0, 0.9), (ANSWERS, 0.1)):
        begun[kind] = 1_000
        reused[kind, age(4) : age(64)] = part * 1_000 / (age(64) - age(4))
    table = worth(begun, reused)
    young = slice(0, age(32))
    assert (table[0, young] > table[ANSWERS, young]).all()
    assert (table[1, young] > table[ANSWERS + 1, young]).all(), "kinds with no record ignore their relatives"


def replay(policy: EvictionPolicy, requests: Iterator[list[int]], pool: int) -> float:
    """The share of the requests' tokens that were cached, in a tree of pages of one token."""
    tree = RadixCache(1, policy, remembered=4 * pool)
    hits = total = 0
    for request in requests:
        tokens = np.array(request, dtype=np.int32)
        lease = tree.lease(tree.match(NAMESPACE, tokens))
        hits, total = hits + lease.num_pages, total + len(tokens)
        tree.evict(tree.num_pages + len(tokens) - lease.num_pages - pool)
        rest = tokens[lease.num_pages :]
        tree.insert(lease, rest, np.zeros(len(rest), dtype=np.int32))
        tree.release(lease)
        assert tree.num_pages <= pool
        assert tree.queued() == {node for node in tree.nodes() if not node.children}
    return hits / total


def loop() -> Iterator[list[int]]:
    for turn in range(1_200):
        yield list(range(turn % 20 * 10, turn % 20 * 10 + 10))


def scan() -> Iterator[list[int]]:
    """Ten hot prompts, each with a question of its own, and long documents that are read once."""
    for turn in range(1_500):
        if turn % 3:
            yield [*range(turn % 10 * 20, turn % 10 * 20 + 20), 1_000 + turn]
        else:
            yield list(range(10_000 + turn * 50, 10_000 + turn * 50 + 40))


def test_part_of_a_loop_longer_than_the_pool_stays() -> None:
    assert replay(eviction_policy("lru"), loop(), 100) == 0
    assert replay(HitDensity(), loop(), 100) > 0.35  # half of the loop fits


def test_a_scan_does_not_flush_what_is_hit() -> None:
    assert replay(HitDensity(), scan(), 260) > replay(eviction_policy("lru"), scan(), 260) + 0.1


def test_the_same_requests_get_the_same_victims() -> None:
    assert replay(HitDensity(), scan(), 260) == replay(HitDensity(), scan(), 260)


def test_an_evicted_edge_that_returns_counts_as_a_hit_and_only_once() -> None:
    policy, root = HitDensity(), Node(NAMESPACE, None, b"", b"", 0, 0)
    leaf, again = (Node(NAMESPACE, root, bytes(4), bytes(4), 0, 0) for _ in range(2))
    leaf.turn = again.turn = 1
    policy.offered(leaf)
    assert policy.victim() is leaf
    policy.stored(again, leaf.memo)
    policy.stored(again, leaf.memo)
    assert policy._reused.sum() == 1


def test_runs_stay_few_whatever_the_number_of_leaves() -> None:
    policy, root = HitDensity(), Node(NAMESPACE, None, b"", b"", 0, 0)
    for number in range(64_000):
        leaf = Node(NAMESPACE, root, bytes(4), bytes(4), 0, number)
        leaf.turn, leaf.answer = 1 + number % 4, number % 300
        policy.offered(leaf)
        assert len(policy._runs) <= RUNS
    victims = {policy.victim() for _ in range(2_000)}
    assert len(victims) == 2_000 and None not in victims
