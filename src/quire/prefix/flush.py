"""Forgetting one namespace of a tree, whatever the eviction policy thinks of it.

What a lease holds cannot go, but no prompt matches it any more: its root is hidden, and a new one takes its place when
the namespace is used again. `sweep` forgets what is below hidden roots once leases have gone.
"""

from __future__ import annotations

import numpy as np

from quire.prefix.ghosts import Ghost
from quire.prefix.node import Node
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids


def flush_namespace(tree: RadixCache, namespace: Namespace) -> tuple[Ids, int]:
    """Forget every page of `namespace`, in every tier, and what is remembered of those that were evicted before.

    Returns the pages that no lease holds, which are the caller's now, and how many others there are, which come from
    `sweep` later. O(nodes and ghosts of the namespace).
    """
    root = tree.roots.get(namespace)
    if root is None:
        return np.empty(0, dtype=np.int32), 0
    pages = _forget(tree, root)
    return pages, tree.hide(root) if tree.roots.get(namespace) is root else 0


def sweep(tree: RadixCache) -> Ids:
    """Forget what was flushed while a lease held it and none does any more; the pages are the caller's. O(what was
    flushed and is left)."""
    return np.concatenate([np.empty(0, dtype=np.int32), *(_forget(tree, root) for root in list(tree.roots.hidden))])


def _forget(tree: RadixCache, root: Node) -> Ids:
    """Forget what no lease holds below a root, and its ghosts; the root goes too where nothing is left."""
    removed: list[Ids] = [np.empty(0, dtype=np.int32)]
    held = [root]
    for node in held:  # grows while it is walked
        for child in list(node.children.values()):
            pages = tree.discard(child, 0)
            if pages is None:
                held.append(child)
            else:
                removed.append(pages)
    ghosts: list[Ghost] = [ghost for node in held for ghost in node.ghosts.values()]
    while ghosts:
        ghost = ghosts.pop()
        ghosts += tree.ghosts.take(ghost, len(ghost.key)).values()
    tree.offer(root)
    return np.concatenate(removed)
