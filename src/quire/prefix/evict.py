"""Eviction policies by name. Most policies order leaves by a key (`Order`); the default is `HitDensity`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count

from quire.errors import InvalidInput
from quire.lazy_queue import LazyQueue
from quire.prefix.hit_density import HitDensity
from quire.prefix.node import Node, Returned
from quire.prefix.policy import EvictionPolicy, live

_SHORT_SHARE = 0.1  # share of leaves in the short queue of S3-FIFO, as published


class Order(EvictionPolicy):
    """Orders leaves by a key, the smallest first. The key is computed when a leaf becomes evictable. O(log leaves)."""

    def __init__(self, key: Callable[[Node], tuple[float, ...]]) -> None:
        self._key = key
        self._queue: LazyQueue[Node] = LazyQueue(live, by_key=True)
        self._tickets = count(1)
        self.last_key: tuple[float, ...] = (0.0,)  # key of the last victim

    def offered(self, node: Node) -> None:
        node.ticket = next(self._tickets)
        self._queue.push(node.ticket, node, self._key(node))

    def victim(self) -> Node | None:
        entry = self._queue.pop()
        if entry is None:
            return None
        entry.item.ticket = 0
        self.last_key = entry.key
        return entry.item

    def candidates(self) -> Iterator[Node]:
        return iter(self._queue)


class GDSF(Order):
    """Greedy dual: hits since the leaf was stored, plus the key of the last victim when the leaf became evictable.
    Every page costs the same to compute, so cost over size is 1."""

    def __init__(self) -> None:
        super().__init__(lambda node: (self.last_key[0] + 1 + node.hits, node.last_used))


class S3FIFO(EvictionPolicy):
    """A short queue for new leaves, and a long one for leaves that were hit in it or came back after eviction. A leaf
    that was hit since it was queued is queued again: in the long queue once per hit, at most three times."""

    def __init__(self) -> None:
        self._queues: tuple[LazyQueue[Node], LazyQueue[Node]] = (LazyQueue(live), LazyQueue(live))
        self._tickets = count(1)

    def stored(self, node: Node, num_pages: int, returned: Returned) -> None:
        if num_pages == node.num_pages:
            node.memo = _Place(long=bool(returned) and returned[-1][0].memo is not None)

    def used(self, node: Node) -> None:
        place = _place(node)
        place.credit = min(3, place.credit + 1)

    def merged(self, child: Node, parent: Node) -> None:
        mine, its = _place(parent), _place(child)
        mine.long |= its.long
        mine.credit = max(mine.credit, its.credit)

    def offered(self, node: Node) -> None:
        node.ticket = next(self._tickets)
        self._queues[_place(node).long].push(node.ticket, node)

    def victim(self) -> Node | None:
        short, long = self._queues
        while short or long:
            from_short = len(short) > _SHORT_SHARE * (len(short) + len(long)) or not long
            entry = (short if from_short else long).pop()
            if entry is None:
                continue
            node = entry.item
            node.ticket = 0
            place = _place(node)
            if not place.credit:
                return node
            place.credit = 0 if from_short else place.credit - 1
            place.long = True
            self.offered(node)
        return None

    def candidates(self) -> Iterator[Node]:
        return chain(*self._queues)


@dataclass(slots=True)
class _Place:
    """The memo of S3-FIFO: whether a node belongs to the long queue, and how often it may still be queued again."""

    long: bool = False
    credit: int = 0


def _place(node: Node) -> _Place:
    if not isinstance(node.memo, _Place):
        node.memo = _Place()
    return node.memo


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "density": HitDensity,
    "lru": partial(Order, lambda node: (node.last_used,)),
    "lfu": partial(Order, lambda node: (node.hits, node.last_used)),
    "slru": partial(Order, lambda node: (node.hits >= 2, node.last_used)),  # segmented: hit at most once, or more often
    "fifo": partial(Order, lambda node: (node.created,)),
    "mru": partial(Order, lambda node: (-node.last_used,)),  # for loops longer than the pool
    "filo": partial(Order, lambda node: (-node.created,)),
    "priority": partial(Order, lambda node: (node.priority, node.last_used)),
    "gdsf": GDSF,
    "s3fifo": S3FIFO,
}
"""The smallest key is evicted first, among equal keys the least recently used. `priority` is that of requests."""
DEFAULT_POLICY = "density"
"""Chosen by measurement: docs/decisions/020-the-order-of-eviction.md."""


def register_eviction(name: str, policy: Callable[[], EvictionPolicy]) -> None:
    """Register an eviction policy under a name, for every cache and engine of this process; each calls `policy()`.

    The process of a server imports the main program again: call this at its top level. A name in use: InvalidInput."""
    if POLICIES.setdefault(name, policy) is not policy:
        raise InvalidInput(f"there is an eviction policy '{name}'.", fix="give yours another name.")


def eviction_policy(name: str) -> EvictionPolicy:
    """A new policy of this name. Raises InvalidInput for an unknown name."""
    if name not in POLICIES:
        raise InvalidInput(f"unknown eviction policy '{name}'.", fix=f"use one of {', '.join(POLICIES)}.")
    return POLICIES[name]()
