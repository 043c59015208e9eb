"""Ghosts: evicted edges, as tokens without pages.

They say why a prompt is not cached any more (`quire.prefix.match`), and tell an eviction policy what came back.
A ghost is a child of the node, or the ghost, that was its edge's parent. It ends when the same tokens are cached again.

    node --[page page]--> node          cached
       \\..[page page page]..> ghost      the oldest are forgotten when ghosts exceed their capacity
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.lazy_queue import LazyQueue
from quire.prefix.node import Node, common_pages


class Ghosts:
    """All ghosts of a tree, oldest first, of at most `capacity` bytes of tokens. `forgotten` is called with the parent
    of each ghost that is forgotten."""

    def __init__(self, capacity: int, page_bytes: int, forgotten: Callable[[Node], None]) -> None:
        self.capacity = capacity
        self._page_bytes = page_bytes
        self._forgotten = forgotten
        self._order: LazyQueue[Node] = LazyQueue(lambda _, ghost: ghost if ghost.eviction is not None else None)
        self.num_bytes = 0

    def leave(self, ghost: Node, parent: Node) -> None:
        """Add the ghost of an edge below `parent`."""
        parent.ghosts[ghost.key[: self._page_bytes]] = ghost
        self._order.push(0, ghost)
        self.num_bytes += len(ghost.key)
        while self.num_bytes > self.capacity:
            self._forget_oldest()

    def returning(self, node: Node, data: bytes) -> tuple[int, dict[bytes, Node], Node | None]:
        """How many bytes of `data` become one edge below `node`, the ghosts at the end of that edge, and the deepest
        ghost that these tokens bring back, which is removed."""
        last: Node | None = None
        below: dict[bytes, Node] = {}
        size = 0
        while size < len(data):
            ghost = node.ghosts.get(data[size : size + self._page_bytes])
            if ghost is None:
                return (size if below else len(data)), below, last
            if size and len(below) > 1:
                break
            last = ghost
            common = common_pages(data, size, ghost.key, self._page_bytes)
            whole = common == len(ghost.key)
            below = self._take(ghost, common)
            size += common
            node = ghost
            if not whole:
                break
        return size, below, last

    def forget_below(self, nodes: Iterable[Node]) -> None:
        """Forget the ghosts below these nodes, and the ghosts below those."""
        ghosts = [ghost for node in nodes for ghost in node.ghosts.values()]
        for ghost in ghosts:  # grows while it is walked
            ghosts += self._take(ghost, len(ghost.key)).values()

    def clear(self) -> None:
        """Forget all ghosts."""
        while self.num_bytes:
            self._forget_oldest()

    def _take(self, ghost: Node, num_bytes: int) -> dict[bytes, Node]:
        """Remove the first `num_bytes` of a ghost, whole pages; returns the ghosts that follow them, without a parent:
        its children, or its rest."""
        assert ghost.parent is not None and ghost.eviction is not None
        del ghost.parent.ghosts[ghost.key[: self._page_bytes]]
        self.num_bytes -= num_bytes
        if num_bytes == len(ghost.key):
            ghost.eviction = None
            return ghost.ghosts
        ghost.key = ghost.key[num_bytes:]
        return {ghost.key[: self._page_bytes]: ghost}

    def _forget_oldest(self) -> None:
        """The oldest ghost has no children, since they are older than their parent."""
        entry = self._order.pop()
        assert entry is not None
        ghost = entry.item
        assert ghost.parent is not None and not ghost.ghosts
        ghost.eviction = None
        del ghost.parent.ghosts[ghost.key[: self._page_bytes]]
        self.num_bytes -= len(ghost.key)
        self._forgotten(ghost.parent)


def hang(node: Node, ghosts: dict[bytes, Node]) -> None:
    """Make these the ghosts of a node that has none."""
    node.ghosts = ghosts
    for ghost in ghosts.values():
        ghost.parent = node
