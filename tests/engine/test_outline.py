"""The outline of a tree, beside a plain recursion over its nodes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.engine.outline import outline_of
from quire.prefix.node import Lease, Node
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from tests.prefix.test_evict import tree_with

NAMESPACES = (Namespace(), Namespace(salt="a"), Namespace(adapter="b"))


def grown(seed: int) -> tuple[RadixCache, list[Lease]]:
    """A tree of three namespaces with many forks, and leases that are held."""
    chance, tree, held, next_id = random.Random(seed), tree_with("lru"), [], 1
    for _ in range(60):
        tokens = np.array([chance.randrange(2) for _ in range(chance.randrange(1, 9))], dtype=np.int32)
        match = tree.match(chance.choice(NAMESPACES), tokens)
        lease, new = tree.lease(match), tokens[match.num_pages :]
        tree.insert(lease, new, np.arange(next_id, next_id + len(new), dtype=np.int32))
        next_id += len(new)
        held.append(lease)
        if chance.random() < 0.9:
            tree.release(held.pop())
    return tree, held


def below(node: Node) -> tuple[int, int, int]:
    """Pages, hits and leases of a node and all below it."""
    own = (node.num_pages, node.hits, node.leases)
    return tuple(map(sum, zip(own, *map(below, node.children.values()), strict=True)))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_those_of_all_below(seed: int) -> None:
    tree, held = grown(seed)
    found = outline_of(tree, most_branches=1000)
    nodes = list(tree.nodes())
    assert found.whole and found.num_nodes == len(found.branches) == len(nodes) > 20
    expected = sorted((*below(node), node.depth, node.num_pages, len(node.children)) for node in nodes)
    shown = [(b.pages, b.hits, b.leases, b.depth, b.own_pages, b.children) for b in found.branches]
    assert sorted(shown) == expected and all(b.device_pages == b.pages for b in found.branches)
    assert sum(each.pages for each in found.namespaces) == tree.num_pages
    assert sum(each.leases for each in found.namespaces) == len(held) > 0
    for each, root in zip(found.namespaces, tree.roots.values(), strict=True):
        assert Namespace(each.adapter, each.salt) == root.namespace
        assert (each.pages, each.hits, each.leases) == below(root)


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_and_the_most_used_are_chosen_with_those_that_they_are_in(seed: int) -> None:
    tree, _ = grown(seed)
    every, found = outline_of(tree, most_branches=1000), outline_of(tree, most_branches=5)
    assert 5 <= len(found.branches) <= 10
    for what in ("pages", "hits"):
        best = sorted((getattr(each, what) for each in every.branches), reverse=True)[:5]
        assert sorted((getattr(each, what) for each in found.branches), reverse=True)[:5] == best
    for at, each in enumerate(found.branches):
        assert each.parent < at
        above = found.branches[each.parent] if each.parent >= 0 else None
        assert each.depth == (above.depth + above.own_pages if above is not None else 0)
        assert above is None or (above.namespace == each.namespace and above.pages > each.pages)


def test_a_look_is_bounded_and_says_so() -> None:
    tree, _ = grown(0)
    found = outline_of(tree, most_nodes=10)
    assert not found.whole and found.num_nodes == 10 - len(NAMESPACES)
    assert all(each.depth <= 3 for each in found.branches), "those near the roots"
    assert sum(each.pages for each in found.namespaces) < tree.num_pages


def test_an_empty_tree_has_nothing() -> None:
    found = outline_of(tree_with("lru"))
    assert found.whole and not found.branches and not found.namespaces
