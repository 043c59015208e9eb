"""EvictedEdges: the latest evicted edges of a tree, as tokens without pages.

They explain why a prompt is not cached any more (`quire.prefix.match`), and tell a policy which edges came back. An
evicted edge is a child of its former parent, cached or evicted. It is removed when its tokens are cached again.

    node --[page page]--> node          cached
       \\..[page page page]..> node      evicted; beyond the capacity the oldest are forgotten
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.lazy_queue import LazyQueue
from quire.prefix.node import Node, common_pages


class EvictedEdges:
    """Their tokens use at most `capacity` bytes; the oldest edges are removed first. `forgotten` is called with the
    parent of each edge that is removed for lack of room."""

    def __init__(self, capacity: int, page_bytes: int, forgotten: Callable[[Node], None]) -> None:
        self.capacity = capacity
        self._page_bytes = page_bytes
        self._forgotten = forgotten
        self._order: LazyQueue[Node] = LazyQueue(lambda _, edge: edge if edge.eviction is not None else None)
        self.num_bytes = 0

    def add(self, edge: Node, parent: Node) -> None:
        """Add an edge that was a child of `parent`."""
        parent.evicted[edge.key[: self._page_bytes]] = edge
        self._order.push(0, edge)
        self.num_bytes += len(edge.key)
        while self.num_bytes > self.capacity:
            self._forget_oldest()

    def returning(self, node: Node, data: bytes) -> tuple[int, dict[bytes, Node], list[tuple[Node, int]]]:
        """How many bytes of `data` become one edge below `node`, the evicted edges at its end, and the evicted edges
        that these tokens cache again, which are removed, each with the number of its pages, the deepest last."""
        returned: list[tuple[Node, int]] = []
        below: dict[bytes, Node] = {}
        size = 0
        while size < len(data):
            edge = node.evicted.get(data[size : size + self._page_bytes])
            if edge is None:
                return (size if below else len(data)), below, returned
            if size and len(below) > 1:
                break
            common = common_pages(data, size, edge.key, self._page_bytes)
            whole = common == len(edge.key)
            below = self._take(edge, common)
            returned.append((edge, common // self._page_bytes))
            size += common
            node = edge
            if not whole:
                break
        return size, below, returned

    def forget_below(self, nodes: Iterable[Node]) -> None:
        """Remove the evicted edges below these nodes, and those below them."""
        edges = [edge for node in nodes for edge in node.evicted.values()]
        for edge in edges:  # grows during the loop
            edges += self._take(edge, len(edge.key)).values()

    def clear(self) -> None:
        """Forget all edges."""
        while self.num_bytes:
            self._forget_oldest()

    def _take(self, edge: Node, num_bytes: int) -> dict[bytes, Node]:
        """Remove the first `num_bytes` of an edge; returns the edges that follow, without a parent."""
        assert edge.parent is not None and edge.eviction is not None
        del edge.parent.evicted[edge.key[: self._page_bytes]]
        self.num_bytes -= num_bytes
        if num_bytes == len(edge.key):
            edge.eviction = None
            return edge.evicted
        edge.key = edge.key[num_bytes:]
        return {edge.key[: self._page_bytes]: edge}

    def _forget_oldest(self) -> None:
        """The oldest edge has no children, because children are evicted before their parent."""
        entry = self._order.pop()
        assert entry is not None
        edge = entry.item
        below = self._take(edge, len(edge.key))
        assert edge.parent is not None and not below
        self._forgotten(edge.parent)


def attach(node: Node, edges: dict[bytes, Node]) -> None:
    """Make these the evicted children of a node that has none."""
    node.evicted = edges
    for edge in edges.values():
        edge.parent = node
