"""LowerOrder: which copies below the device go first: those used longest ago, ends of paths before what is above."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.prefix.node import Node


class LowerOrder:
    """Nodes with copies below, without children that have any, and without leases. O(log nodes) for each."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._ticket = 0
        self._waiting = 0  # entries after the last clean-up

    def offered(self, node: Node) -> None:
        """The node is a candidate, as last used."""
        self._ticket += 1
        node.lower_ticket = self._ticket
        heapq.heappush(self._heap, (node.last_used, node.lower_ticket, node))
        if len(self._heap) > 64 + 2 * self._waiting:
            self._heap = [entry for entry in self._heap if _is_candidate(entry[2], entry[1])]
            heapq.heapify(self._heap)
            self._waiting = len(self._heap)

    def victim(self) -> Node | None:
        """Take the candidate that should go first, or None if there is none."""
        while self._heap:
            _, ticket, node = heapq.heappop(self._heap)
            if _is_candidate(node, ticket):
                return node
        return None

    def candidates(self) -> Iterator[Node]:
        """All candidates, for audits."""
        return (node for _, ticket, node in self._heap if _is_candidate(node, ticket))


def _is_candidate(node: Node, ticket: int) -> bool:
    return ticket == node.lower_ticket and not node.level and node.kept > 0 and not node.num_kept
