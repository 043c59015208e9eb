"""Sieve: the policy SIEVE on prefixes, to compare with. No cache selects it: on conversations it loses to LRU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

from quire.lazy_queue import LazyQueue
from quire.prefix.node import Node, Returned
from quire.prefix.policy import EvictionPolicy, live


@dataclass(slots=True)
class _Place:
    """The memo of a node: its place in the queue, and whether it was used since the hand passed it."""

    at: int
    visited: bool = False


class Sieve(EvictionPolicy):
    """New leaves enter at the queue's end and keep their place. A hand walks from the oldest to the newest and begins
    again. It passes those that were used since it passed them last, and the first other candidate is the victim.
    O(log leaves)."""

    def __init__(self) -> None:
        self._hand = 0
        self._places = count(1)
        self._tickets = count(1)
        self._ahead: LazyQueue[Node] = LazyQueue(live, by_key=True)
        self._behind: LazyQueue[Node] = LazyQueue(live, by_key=True)

    def stored(self, node: Node, num_pages: int, returned: Returned) -> None:
        if num_pages == node.num_pages:
            node.memo = _Place(next(self._places))

    def used(self, node: Node) -> None:
        self._place(node).visited = True

    def merged(self, child: Node, parent: Node) -> None:
        self._place(parent).visited |= self._place(child).visited

    def offered(self, node: Node) -> None:
        node.ticket = next(self._tickets)
        place = self._place(node)
        (self._ahead if place.at >= self._hand else self._behind).push(node.ticket, node, place.at)

    def victim(self) -> Node | None:
        while self._ahead or self._behind:
            entry = self._ahead.pop()
            found: Node | None = None
            if entry is not None:
                place = self._place(entry.item)
                self._hand = place.at + 1
                if place.visited:
                    place.visited = False
                    self.offered(entry.item)
                else:
                    found = entry.item
                    found.ticket = 0
            if next(iter(self._ahead), None) is None:
                self._ahead, self._behind, self._hand = self._behind, self._ahead, 0
            if found is not None:
                return found
        return None

    def candidates(self) -> Iterator[Node]:
        return chain(self._ahead, self._behind)

    def _place(self, node: Node) -> _Place:
        """A split gives the upper part the memo of the lower, which then has one of its own."""
        if not isinstance(node.memo, _Place):
            node.memo = _Place(next(self._places))
        return node.memo
