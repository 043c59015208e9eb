"""GuardedDensity: hit density that knows how outputs end, and leaves eviction to LRU where LRU hits more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from quire.lazy_queue import LazyQueue
from quire.prefix.endings import CLASSES, Endings
from quire.prefix.hit_density import ANSWERS, HITS, KINDS, HitDensity, Stay
from quire.prefix.lru_bound import Guard
from quire.prefix.node import Node
from quire.prefix.policy import live

MOVED = 64  # candidates that a call moves from one order to the other


class GuardedDensity(HitDensity):
    """As HitDensity, with three differences. The last token of an output is a part of the kind: models end a call of a
    tool otherwise than an answer. Ages are those of LRU: a tick is the begin of a request, and the age of a shared
    prompt is that since its last use by any conversation. A guard compares hits with those of LRU on the same requests,
    and candidates are in order of last use while it prefers that."""

    groups = (CLASSES * KINDS, KINDS, HITS * ANSWERS, 1)

    def __init__(self) -> None:
        super().__init__()
        self.guard = Guard()
        self._endings = Endings()
        self._by_use: LazyQueue[Node] = LazyQueue(live, by_key=True)

    # -- learning

    def used(self, node: Node) -> None:
        self.guard.used(node)
        self._now = self.guard.bound.now
        super().used(node)

    def returned(self, edge: Node, num_pages: int) -> None:
        self.guard.returned(edge, num_pages)

    def stored(self, node: Node, memo: object | None) -> None:
        self.guard.stored(node)
        super().stored(node, memo)

    def lengthened(self, node: Node, num_pages: int) -> None:
        self.guard.lengthened(node, num_pages)

    def evicted(self, num_pages: int) -> None:
        self.guard.num_cached = num_pages

    def merged(self, child: Node, parent: Node) -> None:
        child.touched = -abs(child.touched)
        super().merged(child, parent)

    def _begin(self, node: Node) -> Stay:
        self.guard.ended(node.depth + node.num_pages)
        ending, is_new = self._endings.class_of(node.ending)
        first = ending * KINDS
        if is_new:
            self._begun[first : first + KINDS] = self._reused[first : first + KINDS] = 0
        return self._stay(node, first + self._kind(node), node.touched)

    # -- choosing

    def offered(self, node: Node) -> None:
        if not self.guard.by_use:
            super().offered(node)
        else:
            if not isinstance(node.memo, Stay):
                self._begin(node)
            node.ticket = next(self._tickets)
            self._by_use.push(node.ticket, node, node.last_used)
        if self._by_use and self._runs:
            self._move()

    def victim(self) -> Node | None:
        if not self._by_use:
            return super().victim()
        if self._runs:
            self._move()
        # While candidates move, the order that they leave decides.
        if self.guard.by_use and self._runs:
            return super().victim() or self._oldest()
        return self._oldest() or super().victim()

    def statistics(self) -> dict[str, int]:
        return {
            "switches": self.guard.num_switches,
            "won_pages": self.guard.won_pages,
            "lost_pages": self.guard.lost_pages,
        }

    def candidates(self) -> Iterator[Node]:
        return chain(self._by_use, super().candidates())

    def _move(self) -> None:
        """Move candidates to the order that decides. O(1): a few at a time."""
        for _ in range(MOVED):
            node = super().victim() if self.guard.by_use else self._oldest()
            if node is None:
                break
            if self.guard.by_use:
                node.ticket = next(self._tickets)
                self._by_use.push(node.ticket, node, node.last_used)
            else:
                super().offered(node)

    def _oldest(self) -> Node | None:
        """Remove and return the candidate that was used longest ago, of those in order of last use."""
        entry = self._by_use.pop()
        if entry is None:
            return None
        entry.item.ticket = 0
        return entry.item
