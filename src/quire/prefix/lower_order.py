"""LowerOrder: which copies below the device go first: those used longest ago, ends of paths before what is above."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire.lazy_queue import LazyQueue
from quire.prefix.node import Node


class LowerOrder:
    """Nodes whose copies could be given up. `is_candidate` says whether a node's still can. O(log nodes) for each."""

    def __init__(self, is_candidate: Callable[[Node], bool]) -> None:
        self._is_candidate = is_candidate
        self._queue: LazyQueue[Node] = LazyQueue(self._live, by_key=True)
        self._tickets: dict[Node, int] = {}
        self._last = 0

    def offered(self, node: Node) -> None:
        """The node is a candidate, as last used."""
        self._last += 1
        self._tickets[node] = self._last
        self._queue.push(self._last, node, node.last_used)

    def victim(self) -> Node | None:
        """Take the candidate that should go first, or None if there is none."""
        entry = self._queue.pop()
        if entry is None:
            return None
        del self._tickets[entry.item]
        return entry.item

    def candidates(self) -> Iterator[Node]:
        """All candidates, for audits."""
        return iter(self._queue)

    def _live(self, ticket: int, node: Node) -> Node | None:
        if self._tickets.get(node) != ticket:
            return None
        if self._is_candidate(node):
            return node
        del self._tickets[node]
        return None
