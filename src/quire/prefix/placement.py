"""Placement: which tiers have a page. NodeTiers: the same for nodes, and which of them may leave a tier."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, count
from typing import Protocol

import numpy as np

from quire.lazy_queue import LazyQueue
from quire.prefix.node import ID_BYTES, Node, User, path_to
from quire.prefix.policy import EvictionPolicy, live
from quire.spec.ids import Bools, Ids


class Placement(Protocol):
    """Pages are on the device, on lower tiers, or both. On every path the pages on the device come first."""

    def on_device(self, page: int) -> bool:
        """Whether a page is on the device, or on its way to it."""

    def have_copies(self, pages: Ids) -> Bools:
        """Per page: whether it has a copy on a lower tier."""


class NodeTiers:
    """Nodes on the device are offered to `policy`. `copies` queues nodes whose copies may be evicted: the least
    recently used first, and the end of a path before the nodes above it. Without a `placement` every page is on the
    device alone. Only copies of a node's first pages, without a gap, count. In each tier, nodes of ended users come
    before all others: on the device in the order in which they are offered."""

    def __init__(self, placement: Placement | None, policy: EvictionPolicy) -> None:
        self._placement = placement
        self._policy = policy
        self.copies: LazyQueue[Node] = LazyQueue(self._live, by_key=True)
        self._ended: LazyQueue[Node] = LazyQueue(live)
        self._tickets = count(1)

    def is_here(self, node: Node) -> bool:
        """Whether a node's pages are on the device, or on their way to it. True for roots."""
        if self._placement is None or node.parent is None:
            return True
        return self._placement.on_device(int.from_bytes(node.run[:ID_BYTES], sys.byteorder))

    def num_copies(self, node: Node) -> int:
        """How many of a node's pages, from the first on, have copies on lower tiers."""
        if self._placement is None:
            return 0
        found = self._placement.have_copies(node.pages)
        return int(np.argmin(found)) if not found.all() else len(found)

    def offer_here(self, node: Node) -> None:
        """Queue a node that may leave the device."""
        if not node.is_over or self._policy.takes_ended:
            self._policy.offered(node)
        else:
            node.ticket = -next(self._tickets)  # the tickets of policies are above 0
            self._ended.push(node.ticket, node)

    def victim(self) -> Node | None:
        """Remove and return the first node that may leave the device; None if there is none."""
        if not self._ended or (entry := self._ended.pop()) is None:
            return self._policy.victim()
        entry.item.ticket = 0
        return entry.item

    def candidates(self) -> Iterator[Node]:
        """All nodes that may leave the device, for audits. O(entries)."""
        return chain(self._ended, self._policy.candidates())

    def end(self, user: User) -> None:
        """No request of a session follows: its nodes are evicted first. O(its nodes)."""
        user.ended = True
        for node in user.nodes:
            if node.ticket:
                self.offer_here(node)
            if self._placement is not None:
                self.offer_copies(node)

    def offer(self, node: Node) -> None:
        """Queue a node without leases in each tier that it may leave."""
        if self._is_last_here(node):
            self.offer_here(node)
        self.offer_path(node)

    def offer_path(self, node: Node) -> None:
        """Queue the nodes of a path whose copies may be evicted, and its lowest node on the device if it is a leaf."""
        was_here = self.is_here(node)
        for above in path_to(node):
            if above.level:
                break
            self.offer_copies(above)
            if not was_here and self._is_last_here(above):
                self.offer_here(above)
            was_here = self.is_here(above)

    def offer_copies(self, node: Node) -> None:
        """Queue a node if its copies may be evicted."""
        if self._may_lose_copies(node):
            node.copy_ticket = next(self._tickets)
            self.copies.push(node.copy_ticket, node, -1 if node.is_over else node.last_used)

    def _live(self, ticket: int, node: Node) -> Node | None:
        return node if ticket == node.copy_ticket and self._may_lose_copies(node) else None

    def _may_lose_copies(self, node: Node) -> bool:
        """Whether a node has copies and no leases, and no child has copies."""
        if node.level or not node.run or not self.num_copies(node):
            return False
        return not any(self.num_copies(child) for child in reversed(node.children.values()))

    def _is_last_here(self, node: Node) -> bool:
        """Whether a node is on the device, and no child is."""
        # The last child came to the device last, so this loop is short.
        return self.is_here(node) and not any(self.is_here(child) for child in reversed(node.children.values()))
