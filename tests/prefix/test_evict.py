"""Eviction policies: one history, seven orders, each worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from quire.engine.config import engine_config
from quire.errors import InvalidInput
from quire.prefix.evict import POLICIES, Order, eviction_policy, register_eviction
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from tests.covering import each_of

NAMESPACE = Namespace()

# Stored in the order a b c d e, then hit in the order d d d b b a.
#               a  b  c  d  e
# hits          1  2  0  3  0
# last used     5  4  1  3  2      (1 is the longest ago)
# priority      1  0  2  1  0      (a was stored with 0 and hit with 1)
ORDERS = {
    "lru": "cedba",
    "lfu": "ceabd",
    "slru": "ceadb",
    "fifo": "abcde",
    "mru": "abdec",
    "filo": "edcba",
    "priority": "ebdac",
}


def tree_with(policy: str, page_size: int = 1) -> RadixCache:
    return RadixCache(page_size, eviction_policy(policy))


def ids(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def store(tree: RadixCache, text: str, pages: list[int] | None = None, *, priority: int = 0) -> None:
    """Cache a text as a request would that hits what it can; page n of the alphabet stands for letter n."""
    match = tree.match(NAMESPACE, ids(text))
    lease = tree.lease(match, priority=priority)
    new = pages or [ord(letter) - ord("a") + 1 for letter in text]
    tree.insert(lease, ids(text)[match.num_pages * tree.page_size :], np.array(new, dtype=np.int32)[match.num_pages :])
    tree.release(lease)


def hit(tree: RadixCache, text: str, *, priority: int = 0) -> None:
    tree.release(tree.lease(tree.match(NAMESPACE, ids(text)), priority=priority))


def eviction_order(policy: str) -> str:
    tree = tree_with(policy)
    for letter, priority in zip("abcde", (0, 0, 2, 1, 0), strict=True):
        store(tree, letter, priority=priority)
    for letter in "dddbb":
        hit(tree, letter)
    hit(tree, "a", priority=1)
    return "".join(chr(int(tree.evict(1)[0]) + ord("a") - 1) for _ in range(5))


def check_eviction_orders() -> None:
    assert {policy: eviction_order(policy) for policy in ORDERS} == ORDERS


def test_each_policy_has_its_own_order() -> None:
    check_eviction_orders()
    assert set(ORDERS) == set(POLICIES) - {"density", "gdsf", "s3fifo"}, "those four depend on what went before"
    assert len(set(ORDERS.values())) == len(ORDERS), "two policies in one order could be the same policy"


def test_a_policy_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.prefix.evict.POLICIES", dict(POLICIES))

    def newest() -> Order:
        return Order(lambda node: (-node.created,))

    register_eviction("newest", newest)
    register_eviction("newest", newest)  # a program that is imported again
    assert engine_config(eviction="newest").eviction == "newest"
    tree = RadixCache(1, eviction_policy("newest"))
    for letter in "abc":
        store(tree, letter)
    assert tree.evict(1).tolist() == [3]
    with pytest.raises(InvalidInput, match="there is an eviction policy 'lru'"):
        register_eviction("lru", newest)
    with pytest.raises(InvalidInput, match="unknown eviction policy 'oldest'"):
        engine_config(eviction="oldest")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_leaf_loses_its_tail_first(policy: str) -> None:
    tree = tree_with(policy)
    store(tree, "abcde")
    assert tree.evict(2).tolist() == [4, 5]
    assert tree.match(NAMESPACE, ids("abcde")).pages.tolist() == [1, 2, 3]
    assert tree.evict(1).tolist() == [3]
    assert tree.evict(9).tolist() == [1, 2]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_children_go_before_their_parent(policy: str) -> None:
    tree = tree_with(policy)
    store(tree, "abc")
    store(tree, "abd")
    assert set(tree.evict(2).tolist()) == {3, 4}
    assert tree.evict(9).tolist() == [1, 2]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_is_leased_stays_whatever_the_policy(policy: str) -> None:
    tree = tree_with(policy)
    for letter in "abcde":
        store(tree, letter)
    lease = tree.lease(tree.match(NAMESPACE, ids("c")))
    assert sorted(tree.evict(9).tolist()) == [1, 2, 4, 5]
    assert tree.evict(9).tolist() == []
    tree.release(lease)
    assert tree.evict(9).tolist() == [3]


def test_hits_count_on_every_ancestor_and_survive_a_split() -> None:
    tree = tree_with("lfu")
    store(tree, "abcd")
    for _ in range(3):
        hit(tree, "abcd")
    hit(tree, "ab")
    hits = {node.key: node.hits for node in tree.nodes()}
    assert hits == {ids("ab").tobytes(): 4, ids("cd").tobytes(): 3}


def test_the_highest_priority_that_used_a_page_counts() -> None:
    tree = tree_with("priority")
    store(tree, "a")
    store(tree, "b", priority=1)
    hit(tree, "a", priority=2)
    hit(tree, "a", priority=0)
    assert tree.evict(1).tolist() == [2]


def test_a_use_while_queued_moves_a_leaf_back() -> None:
    tree = tree_with("lru")
    for letter in "abc":
        store(tree, letter)
    hit(tree, "a")
    assert [int(tree.evict(1)[0]) for _ in range(3)] == [2, 3, 1]


def test_the_queue_stays_short_when_leaves_are_hit_for_ever() -> None:
    policy = eviction_policy("lru")
    assert isinstance(policy, Order)
    tree = RadixCache(1, policy)
    for letter in "abc":
        store(tree, letter)
    for _ in range(2_000):
        hit(tree, "a")
    assert len(policy._queue) < 200
    assert [int(tree.evict(1)[0]) for _ in range(3)] == [2, 3, 1]


def test_greedy_dual_lets_old_hits_fade() -> None:
    tree = tree_with("gdsf")
    store(tree, "a")
    for _ in range(2):
        hit(tree, "a")
    for letter in "bcde":  # each is hit once, and what takes its place begins where it ended
        store(tree, letter)
        hit(tree, letter)
        if tree.num_pages > 2:
            tree.evict(1)
    cached = {node.key for node in tree.nodes()}
    assert ids("a").tobytes() not in cached, "two hits long ago outlived everything"


def test_s3fifo_keeps_what_was_hit_from_a_scan() -> None:
    tree = tree_with("s3fifo")
    store(tree, "ab")
    store(tree, "ab")
    for letter in "cdefghijklmnopqrstuvwxyz":
        store(tree, letter)
        if tree.num_pages > 6:
            tree.evict(1)
    assert tree.match(NAMESPACE, ids("ab")).num_pages == 2


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match=r"'lrru'.*density, lru, lfu, slru, fifo, mru, filo, priority, gdsf, s3fifo"):
        eviction_policy("lrru")


@each_of("count", [200, 300, 1025])
@each_of("policy", POLICIES)
def test_whatever_is_evictable_is_evicted_when_asked_for(policy: str, count: int) -> None:
    """Also where the first eviction comes after more leaves than a policy holds runs of."""
    tree = tree_with(policy)
    for leaf in range(count):
        lease = tree.lease(tree.match(NAMESPACE, np.array([leaf], dtype=np.int32)))
        tree.insert(lease, np.array([leaf], dtype=np.int32), np.array([leaf + 1], dtype=np.int32))
        tree.release(lease)
    assert len(tree.evict(count // 2)) == count // 2
    assert len(tree.evict(count)) == count - count // 2
