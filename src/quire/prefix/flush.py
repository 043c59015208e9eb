"""Forgetting one namespace of a tree, whatever the eviction policy thinks of it."""

from __future__ import annotations

import numpy as np

from quire.prefix.ghosts import Eviction, Ghost
from quire.prefix.node import Node
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids


def flush_namespace(tree: RadixCache, namespace: Namespace) -> Ids:
    """Forget every page of `namespace` that no lease holds, and what is remembered of those that were evicted before;
    returns the pages, which are the caller's now. O(nodes and ghosts of the namespace)."""
    root = tree.root(namespace)
    if root is None:
        return np.empty(0, dtype=np.int32)
    nodes = nodes_below(root)
    gone = Eviction("flush", tree._clock, tree._seconds())
    runs = [tree._cut(node, 0, gone) for node in reversed(nodes) if not node.level]
    pages = np.frombuffer(b"".join(runs), dtype=np.int32)
    tree.num_pages -= len(pages)
    ghosts: list[Ghost] = [ghost for node in (root, *nodes) for ghost in node.ghosts.values()]
    while ghosts:
        ghost = ghosts.pop()
        ghosts += tree.ghosts.take(ghost, len(ghost.key)).values()
    tree._offer(root)
    return pages


def nodes_below(root: Node) -> list[Node]:
    """The nodes of one namespace, parents before children."""
    nodes = list(root.children.values())
    for node in nodes:
        nodes += node.children.values()
    return nodes
