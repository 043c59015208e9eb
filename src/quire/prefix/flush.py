"""Forgetting one namespace of a tree, whatever the eviction policy thinks of it.

What a lease holds cannot go. It is not found any more all the same: its root becomes an orphan, under which pages stay
for whoever holds them, and a new one takes its place when the namespace is used again. Orphans are swept when leases
have gone.
"""

from __future__ import annotations

from quire.prefix.ghosts import Ghost
from quire.prefix.node import Node
from quire.prefix.radix_cache import join_ids
from quire.prefix.tiered import TieredRadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier


def flush_namespace(tree: TieredRadixCache, namespace: Namespace) -> Ids:
    """Forget every page of `namespace`, on the device and below, and what is remembered of those that were evicted
    before. Returns the pages that no lease holds, which are the caller's now; those that one does are found by nobody
    from now on, and come from `sweep`. O(nodes and ghosts of the namespace)."""
    root = tree.root(namespace)
    if root is None:
        return join_ids([])
    pages = _forget(tree, root)
    if tree.root(namespace) is root:
        _orphan(tree, root)
    return pages


def sweep(tree: TieredRadixCache) -> Ids:
    """Forget what was flushed while a lease held it and is not held any more; the pages are the caller's. O(what is
    still held, and what is not)."""
    return join_ids([_forget(tree, root).tobytes() for root in list(tree.orphans)])


def nodes_below(root: Node) -> list[Node]:
    """The nodes of one namespace, parents before children."""
    nodes = list(root.children.values())
    for node in nodes:
        nodes += node.children.values()
    return nodes


def _forget(tree: TieredRadixCache, root: Node) -> Ids:
    """Forget what no lease holds below a root, and its ghosts; the root goes too where nothing is left."""
    removed: list[bytes] = []
    held = [root]
    for node in held:  # grows while it is walked
        for child in list(node.children.values()):
            pages = tree.discard(child, 0)
            if pages is None:
                held.append(child)
            else:
                removed.append(pages.tobytes())
    ghosts: list[Ghost] = [ghost for node in held for ghost in node.ghosts.values()]
    while ghosts:
        ghost = ghosts.pop()
        ghosts += tree.ghosts.take(ghost, len(ghost.key)).values()
    tree._offer(root)
    return join_ids(removed)


def _orphan(tree: TieredRadixCache, root: Node) -> None:
    """Nobody finds what hangs below this root any more."""
    tree.version += 1
    for first in root.children:
        tree._begins_no_more(first, root)
    del tree._roots[root.namespace]
    tree.orphans.append(root)
    if tree._emit is not None:
        for node in reversed(nodes_below(root)):
            if node.here:
                tree._tell_removed(node, 0, node.num_pages, Tier.DEVICE)
            tree._tell_removed(node, 0, node.kept, Tier.HOST)
            node.hashes = []  # what becomes of it later is nobody's business
