"""OwedPaths: cached paths of which something has still to be moved to another tier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from quire.prefix.node import Node
from quire.prefix.radix_cache import RadixCache

_MOST_PATHS = 4096
_MOST_ENDS = 64


class OwedPaths:
    """Ends of paths, by their nodes, in the order in which they came; of each, numbers of pages behind which requests
    may begin. They keep nothing in the tree: what leaves it is owed no more, and of a path what is left of it. At most
    4,096; beyond that the one that came first is given up, and counted in `num_given_up`.
    """

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._ends: dict[Node, tuple[int, ...]] = {}
        self._num_forgotten = 0
        self.num_given_up = 0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, node: Node, ends: Iterable[int] = ()) -> None:
        """A path is owed, from now on if it was not before."""
        known = self._ends.get(node, ())
        self._ends[node] = tuple(dict.fromkeys((*known, *ends)))[-_MOST_ENDS:]
        if len(self._ends) > _MOST_PATHS:
            del self._ends[next(iter(self._ends))]
            self.num_given_up += 1

    def first(self, count: int) -> Iterator[tuple[Node, Node, tuple[int, ...]]]:
        """Of those that came first: what `remove` takes, the node at which the path ends now, and its numbers. Paths
        of which nothing is left are dropped. Others may be added and removed meanwhile."""
        for node, ends in list(islice(self._ends.items(), count)):
            living = self._living(node)
            if living is None:
                self._ends.pop(node, None)  # or it went while this was read
            else:
                yield node, living, ends

    def remove(self, node: Node) -> None:
        """It is owed no more."""
        self._ends.pop(node, None)

    def forgotten(self, num_pages: int) -> None:
        """So many pages have left the cache. Paths that ended there end above it, or are no more."""
        self._num_forgotten += num_pages if self._ends else 0
        if self._num_forgotten > _MOST_PATHS:
            self._num_forgotten = 0
            owed, self._ends = self._ends, {}
            for node, ends in owed.items():
                living = self._living(node)
                if living is not None:
                    self.add(living, ends)

    def _living(self, node: Node) -> Node | None:
        """The node, or the last one above it that is still cached; None where nobody finds it any more."""
        while not node.run and node.parent is not None:
            node = node.parent
        root = node
        while root.parent is not None:
            root = root.parent
        return node if root is not node and self._tree.roots.get(node.namespace) is root else None
