"""The tree with a tier below: what a lease that ends further down leaves to be evicted above it."""

from __future__ import annotations

import numpy as np
import pytest

from quire.prefix.evict import eviction_policy
from quire.prefix.tiered import TieredRadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids

SPACE = Namespace()


def ids(*numbers: int) -> Ids:
    return np.array(numbers, dtype=np.int32)


@pytest.fixture
def tree() -> TieredRadixCache:
    """Pages 1 to 4 of one token each, of which 1 and 2 have copies; 3 and 4 are an edge of their own."""
    tree = TieredRadixCache(1, eviction_policy("lru"))
    lease = tree.lease(tree.match(SPACE, ids()), 0)
    tree.insert(lease, ids(11, 12, 13, 14), ids(1, 2, 3, 4))
    other = tree.lease(tree.match(SPACE, ids(11, 12)), 2)
    tree.keep(other, 0, 2)
    tree.release(other)
    tree.release(lease)
    return tree


def test_copies_above_a_lease_that_ends_can_be_given_up(tree: TieredRadixCache) -> None:
    lease = tree.lease(tree.match(SPACE, ids(11, 12, 13, 14)))
    assert not len(tree.evict_lower(2).moved)
    tree.release(lease)
    assert tree.evict_lower(2).moved.tolist() == [1, 2]


def test_what_is_here_above_a_lease_below_can_leave(tree: TieredRadixCache) -> None:
    """The lease is of pages that are on the host only, so that the last ones here are above it."""
    pin = tree.pin_path(tree.match(SPACE, ids(11, 12, 13, 14)), 4)
    tree.keep(pin, 2, 4)
    tree.unpin(pin)
    assert tree.evict_device(2, "", lambda node: node.kept).moved.tolist() == [3, 4]
    lease = tree.pin_path(tree.match(SPACE, ids(11, 12, 13, 14)), 4)
    assert not len(tree.evict_device(2, "", lambda node: node.kept).moved)
    tree.unpin(lease)
    assert tree.evict_device(2, "", lambda node: node.kept).moved.tolist() == [1, 2]
