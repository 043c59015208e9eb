"""The radix tree by itself: edges, splits, leases, events. Pages are letters' places in the alphabet."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from quire.errors import LeaseError
from quire.prefix import hashing
from quire.prefix.evict import eviction_policy
from quire.prefix.hashing import chain_pages, namespace_seed
from quire.prefix.node import pages_to
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import AllCleared, CacheEvent, Namespace, PagesRemoved, PagesStored
from tests.clear import clear_tree
from tests.prefix.test_evict import NAMESPACE, ids, store, tree_with


def edges(tree: RadixCache) -> set[tuple[str, tuple[int, ...]]]:
    def text(key: bytes) -> str:
        return "".join(map(chr, np.frombuffer(key, dtype=np.int32)))

    return {(text(node.key), tuple(node.pages.tolist())) for node in tree.nodes()}


def pages_of(tree: RadixCache, text: str, namespace: Namespace = NAMESPACE) -> list[int]:
    return tree.match(namespace, ids(text)).pages.tolist()


def test_one_edge_for_one_prefix_and_a_cut_where_two_part() -> None:
    tree = tree_with("lru")
    store(tree, "abcd")
    assert edges(tree) == {("abcd", (1, 2, 3, 4))}
    store(tree, "abx", [1, 2, 24])
    assert edges(tree) == {("ab", (1, 2)), ("cd", (3, 4)), ("x", (24,))}
    assert pages_of(tree, "abcz") == [1, 2, 3]
    assert tree.num_pages == 5


@pytest.mark.parametrize(
    ("text", "pages"),
    [("", []), ("a", []), ("ab", [1]), ("abc", [1]), ("abcd", [1, 2]), ("abcx", [1]), ("xbcd", []), ("abcdef", [1, 2])],
)
def test_only_whole_pages_match(text: str, pages: list[int]) -> None:
    tree = tree_with("lru", page_size=2)
    store(tree, "abcd", [1, 2])
    assert pages_of(tree, text) == pages


def test_a_cut_under_a_lease_keeps_both_parts() -> None:
    tree = tree_with("lru")
    store(tree, "abcd")
    lease = tree.lease(tree.match(NAMESPACE, ids("abcd")))
    other = tree.lease(tree.match(NAMESPACE, ids("ab")))
    assert (tree.num_protected, tree.num_shared, tree.num_evictable) == (4, 2, 0)
    tree.release(lease)
    assert (tree.num_protected, tree.num_shared, tree.num_evictable) == (2, 0, 2)
    assert sorted(tree.evict(9).tolist()) == [3, 4]
    tree.release(other)
    assert sorted(tree.evict(9).tolist()) == [1, 2]
    assert tree.roots == {}


def test_growing_alone_lengthens_the_edge() -> None:
    tree = tree_with("lru")
    lease = tree.lease(tree.match(NAMESPACE, ids("")))
    tree.insert(lease, ids("ab"), np.array([1, 2], dtype=np.int32))
    tree.insert(lease, ids("c"), np.array([3], dtype=np.int32))
    assert edges(tree) == {("abc", (1, 2, 3))}
    assert lease.num_pages == tree.num_protected == 3
    assert pages_to(lease.node).tolist() == [1, 2, 3]


def test_duplicates_come_back_and_the_trees_pages_stand() -> None:
    tree = tree_with("lru")
    first = tree.lease(tree.match(NAMESPACE, ids("")))
    second = tree.lease(tree.match(NAMESPACE, ids("")))
    tree.insert(first, ids("abc"), np.array([1, 2, 3], dtype=np.int32))
    found = tree.insert(second, ids("abx"), np.array([7, 8, 9], dtype=np.int32))
    assert found.pages.tolist() == [1, 2, 9]
    assert found.duplicates.tolist() == [7, 8]
    assert pages_to(first.node).tolist() == [1, 2, 3]
    assert tree.num_shared == 2


def test_what_the_tree_holds_is_a_copy() -> None:
    tree = tree_with("lru")
    row = np.array([1, 2, 3], dtype=np.int32)
    lease = tree.lease(tree.match(NAMESPACE, ids("")))
    tree.insert(lease, ids("abc"), row)
    row[:] = 0
    assert pages_of(tree, "abc") == [1, 2, 3]


def test_namespaces_share_nothing() -> None:
    tree = tree_with("lru")
    store(tree, "ab")
    for other in (Namespace("a"), Namespace(salt="a"), Namespace("a", "a")):
        assert pages_of(tree, "ab", other) == []
        lease = tree.lease(tree.match(other, ids("ab")))
        tree.insert(lease, ids("ab"), np.array([8, 9], dtype=np.int32))
        assert pages_of(tree, "ab", other) == [8, 9]
    assert pages_of(tree, "ab") == [1, 2]


def test_a_lease_ends_once() -> None:
    tree = tree_with("lru")
    store(tree, "ab")
    lease = tree.lease(tree.match(NAMESPACE, ids("ab")))
    tree.release(lease)
    for use in (tree.release, lambda lease: tree.insert(lease, ids("c"), ids("c"))):
        with pytest.raises(LeaseError, match="released"):
            use(lease)
    assert tree.num_protected == 0


def test_an_outdated_match_is_not_leased() -> None:
    tree = tree_with("lru")
    store(tree, "abcd")
    match = tree.match(NAMESPACE, ids("abcd"))
    tree.evict(1)
    with pytest.raises(LeaseError, match="match again"):
        tree.lease(match)
    assert tree.num_protected == 0


def test_a_match_survives_growth_of_its_last_edge() -> None:
    tree = tree_with("lru")
    lease = tree.lease(tree.match(NAMESPACE, ids("")))
    tree.insert(lease, ids("ab"), np.array([1, 2], dtype=np.int32))
    match = tree.match(NAMESPACE, ids("ab"))
    tree.insert(lease, ids("cd"), np.array([3, 4], dtype=np.int32))
    other = tree.lease(match)
    assert pages_to(other.node).tolist() == [1, 2]
    assert (tree.num_protected, tree.num_shared) == (4, 2)


def test_part_of_a_match_can_be_leased() -> None:
    tree = tree_with("lru")
    store(tree, "abcd")
    lease = tree.lease(tree.match(NAMESPACE, ids("abcd")), 1)
    assert lease.num_pages == tree.num_protected == 1
    assert sorted(tree.evict(9).tolist()) == [2, 3, 4]


def test_clear_forgets_all_but_what_is_leased() -> None:
    events: list[CacheEvent] = []
    tree = RadixCache(1, eviction_policy("lru"), emit=events.append)
    store(tree, "abcd")
    lease = tree.lease(tree.match(NAMESPACE, ids("a")))
    assert sorted(clear_tree(tree).tolist()) == [2, 3, 4]
    assert not any(isinstance(event, AllCleared) for event in events)
    tree.release(lease)
    assert clear_tree(tree).tolist() == [1]
    assert isinstance(events[-1], AllCleared)


def test_long_edges_are_compared_to_the_exact_token() -> None:
    tree = RadixCache(4, eviction_policy("lru"))
    tokens = np.arange(4_000, dtype=np.int32)
    lease = tree.lease(tree.match(NAMESPACE, tokens[:0]))
    tree.insert(lease, tokens, np.arange(1, 1_001, dtype=np.int32))
    for at in (0, 3, 4, 1_999, 2_000, 3_996, 3_999):
        other = tokens.copy()
        other[at] += 256  # differs in the second byte only
        assert tree.match(NAMESPACE, other).num_pages == at // 4


# -- events


def test_events_tell_pages_with_their_chain() -> None:
    events: list[CacheEvent] = []
    tree = RadixCache(2, eviction_policy("lru"), emit=events.append)
    store(tree, "abcd", [1, 2])
    store(tree, "abxy", [1, 3])
    tree.evict(1)
    seed = namespace_seed(NAMESPACE)
    head = b"quire-page-2\x08\0\0\0"
    first = hashlib.sha256(head + seed + ids("ab").tobytes()).digest()
    second = hashlib.sha256(head + first + ids("cd").tobytes()).digest()
    third = hashlib.sha256(head + first + ids("xy").tobytes()).digest()
    abcd, xy, gone = events
    assert isinstance(abcd, PagesStored) and isinstance(xy, PagesStored) and isinstance(gone, PagesRemoved)
    assert (abcd.parent, abcd.hashes, abcd.tokens) == (seed, (first, second), ids("abcd").tobytes())
    assert (xy.parent, xy.hashes, xy.tokens) == (first, (third,), ids("xy").tobytes())
    assert gone.hashes == (second,)


def test_without_a_listener_nothing_is_hashed() -> None:
    tree = tree_with("lru")
    store(tree, "abcd")
    assert all(node.hashes == [] for node in tree.nodes())


def test_nothing_is_hashed_before_a_hash_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[CacheEvent] = []
    tree = RadixCache(1, eviction_policy("lru"), emit=events.append)
    hashed: list[int] = []
    monkeypatch.setattr(hashing, "chain_pages", lambda *given: hashed.append(1) or chain_pages(*given))
    store(tree, "abcd")
    store(tree, "abx", [1, 2, 24])
    tree.evict(2)
    assert not hashed
    kinds = {type(event) for event in events}
    assert kinds == {PagesStored, PagesRemoved}
    chained = {digest for event in events if isinstance(event, PagesStored) for digest in event.hashes}
    removed = {digest for event in events if isinstance(event, PagesRemoved) for digest in event.hashes}
    assert removed < chained and len(chained) == 5 and len(hashed) == 2, "each page once, however often it is named"


def test_hashes_are_fixed_for_ever() -> None:
    """Other processes and machines compute the same keys; a change here needs another version in the prefix."""
    seed = namespace_seed(Namespace("lora", "tenant"))
    assert namespace_seed(Namespace(), b"one model") != namespace_seed(Namespace(), b"another")
    assert namespace_seed(Namespace(), b"x") != namespace_seed(Namespace("x"))
    expected = hashlib.sha256(
        b"quire-namespace-2\3" + bytes(7) + bytes(8) + b"\4" + bytes(7) + b"lora" + b"\6" + bytes(7) + b"tenant"
    ).digest()
    assert seed == expected
    empty = hashlib.sha256(b"quire-namespace-2\3" + bytes(7) + bytes(24)).digest()
    assert namespace_seed(Namespace()) == empty
    one, two = chain_pages(seed, ids("abcde").tobytes(), 8)
    head = b"quire-page-2\x08\0\0\0"
    assert one == hashlib.sha256(head + seed + ids("ab").tobytes()).digest()
    assert two == hashlib.sha256(head + one + ids("cd").tobytes()).digest()


def test_every_part_of_a_key_changes_it() -> None:
    namespaces = [
        Namespace(),
        Namespace("a"),
        Namespace(salt="a"),
        Namespace("a", "a"),
        Namespace("aa"),
        Namespace("é"),
    ]
    assert len({namespace_seed(namespace) for namespace in namespaces}) == len(namespaces)
    seed = namespace_seed(Namespace())
    texts = ["ab", "ba", "aa", "abab"]
    assert len({chain_pages(seed, ids(text).tobytes(), 4)[-1] for text in texts}) == len(texts)
