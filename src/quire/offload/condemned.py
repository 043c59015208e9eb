"""Condemned: paths that are to be forgotten because of damaged pages on them."""

from __future__ import annotations

from collections.abc import Callable

from quire.cache.hold import Hold, Holds, Reason
from quire.prefix.node import Node
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Ids


class Condemned:
    """`paths` are held, each with the page from which on it is to be forgotten once nothing else holds it. `forget`
    gives back pages that have left the tree."""

    def __init__(self, tree: RadixCache, holds: Holds, forget: Callable[[Ids], None]) -> None:
        self.paths: list[tuple[Hold, int]] = []
        self._tree = tree
        self._holds = holds
        self._forget = forget

    def __len__(self) -> int:
        return len(self.paths)

    def add(self, node: Node, first: int) -> None:
        """All from page `first` of the path to a node on is forgotten once nothing holds it."""
        self.paths.append((self._holds.add(Reason.DAMAGE, lease=self._tree.pin(node)), first))

    def discard(self) -> int:
        """Forget what was condemned and is held by nothing else; returns how many paths that was. They may have pages
        in common, so that none is kept by what another one holds."""
        waiting = [(hold.path.node, first) for hold, first in self.paths]
        for hold, _ in self.paths:
            self._holds.release(hold)
        self.paths = []
        for end, first in waiting:
            node = end
            while node.depth > first and node.parent is not None:
                node = node.parent
            if node.parent is None or node.depth + node.num_pages <= first:
                continue  # it went with another one
            pages = self._tree.discard(node, first - node.depth)
            if pages is None:
                self.add(end, first)
            else:
                self._forget(pages)
        return len(waiting) - len(self.paths)
