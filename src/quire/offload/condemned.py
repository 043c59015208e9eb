"""Condemned: paths that are to be forgotten because of damaged pages on them."""

from __future__ import annotations

from collections.abc import Callable

from quire.prefix.node import Lease, Node
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Ids


class Condemned:
    """`paths` are pinned, each with the page from which on it is to be forgotten once nobody else holds it. `forget`
    gives back pages that have left the tree."""

    def __init__(self, tree: RadixCache, forget: Callable[[Ids], None]) -> None:
        self.paths: list[tuple[Lease, int]] = []
        self._tree = tree
        self._forget = forget

    def __len__(self) -> int:
        return len(self.paths)

    def add(self, node: Node, first: int) -> None:
        """All from page `first` of the path to a node on is forgotten once nobody holds it."""
        self.paths.append((self._tree.pin(node), first))

    def discard(self) -> int:
        """Forget what was condemned and is held by nobody; how many paths that was. They may have pages in common, so
        that none is kept by what another one holds."""
        waiting = [(lease.node, first) for lease, first in self.paths]
        for lease, _ in self.paths:
            self._tree.release(lease)
        held = []
        for end, first in waiting:
            node = end
            while node.depth > first and node.parent is not None:
                node = node.parent
            if node.parent is None or node.depth + node.num_pages <= first:
                continue  # it went with another one
            pages = self._tree.discard(node, first - node.depth)
            if pages is None:
                held.append((end, first))
            else:
                self._forget(pages)
        self.paths = [(self._tree.pin(end), first) for end, first in held]
        return len(waiting) - len(held)
