"""Placement: which tiers have a page. NodeTiers: the same for nodes, and which of them may leave a tier."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Protocol

import numpy as np

from quire.lazy_queue import Entry, LazyQueue
from quire.prefix.node import ID_BYTES, Node, User, pages_to, path_to
from quire.prefix.policy import EvictionPolicy, live
from quire.spec.ids import Bools, Ids

_OVER = -1  # in place of the last use of a node of an ended user


class Placement(Protocol):
    """Pages are on the device, on lower tiers, or both. On every path the pages on the device come first."""

    def on_device(self, page: int) -> bool:
        """Whether a page is on the device, or on its way to it."""

    def have_copies(self, pages: Ids) -> Bools:
        """Per page: whether it has a copy on a lower tier."""


class Ends(Protocol):
    """After which pages of a path requests can begin, where not after each one: some layers read only the last pages,
    and pages that no request can begin after are worth nothing."""

    def last(self, pages: Ids) -> int:
        """After how many of a path's `pages`, from the first on, a request can begin, at most."""

    def share(self, pages: Ids, first: int) -> float:
        """What a request saves by the end of a path of `pages`, for each byte that is free without it, as a part of
        what a page alone saves. The pages from `first` on are free. 0: no request can begin at the end."""


class NodeTiers:
    """Nodes on the device are offered to `policy`. Copies are evicted from the end of a path before those above it: of
    the least recently used node, or with `compare_copies` of some of these the one that is worth least to the policy.
    Without a `placement` every page is on the device alone. Only copies of a node's first pages, without a gap, count.
    In each tier, nodes of ended users come before all others, as do those at whose end no request can begin: on the
    device in the order in which they are offered. `ends` None: a request can begin after each page."""

    def __init__(self, placement: Placement | None, policy: EvictionPolicy) -> None:
        self._placement = placement
        self._policy = policy
        self.ends: Ends | None = None
        self._ending_at: dict[int, Node] = {}  # nodes in the policy's queue, by their last page
        self._copies: LazyQueue[Node] = LazyQueue(_queued, by_key=True)
        self._oldest: list[Entry[Node]] = []  # taken from `_copies`, to be compared
        self._num_compared = 1
        self._first: LazyQueue[Node] = LazyQueue(live)
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
        if self.ends is not None:
            node.share = self.ends.share(pages_to(node), node.depth)
            self._ending_at[int(node.pages[-1])] = node
        if node.goes_first and not self._policy.takes_first:
            node.ticket = -next(self._tickets)  # the tickets of policies are above 0
            self._first.push(node.ticket, node)
        else:
            self._policy.offered(node)

    def ends_by(self, ends: Ends) -> None:
        """Where requests can begin, if not after each page; before any page is cached."""
        self.ends = ends

    def lost(self, pages: Ids) -> None:
        """Cached pages have lost frames: nodes that end there may be worth nothing, and are evicted first then."""
        for page in pages.tolist():
            node = self._ending_at.get(page)
            if node is not None and node.ticket > 0 and node.pages[-1] == page:
                self.offer_here(node)

    def cut(self, node: Node, keep: int, most: int) -> int:
        """How many of the first `keep` pages of a node are worth keeping without the others; of which `most` may go."""
        if self.ends is None or not keep:
            return keep
        above = node.parent
        pages = np.concatenate((pages_to(above), node.pages[:keep])) if above is not None else node.pages[:keep]
        return max(0, node.num_pages - most, self.ends.last(pages) - node.depth)

    def victim(self) -> Node | None:
        """Remove and return the first node that may leave the device; None if there is none."""
        if not self._first or (entry := self._first.pop()) is None:
            return self._policy.victim()
        entry.item.ticket = 0
        return entry.item

    def candidates(self) -> Iterator[Node]:
        """All nodes that may leave the device, for audits. O(entries)."""
        return chain(self._first, self._policy.candidates())

    def copy_candidates(self) -> Iterator[Node]:
        """All nodes whose copies may be evicted, for audits. O(entries)."""
        oldest = (each.item for each in self._oldest if _queued(each.ticket, each.item))
        return filter(self._may_lose_copies, chain(self._copies, oldest))

    def compare_copies(self) -> None:
        """Copies are made of what leaves the device: what the policy expects decides about them too."""
        self._num_compared = 16 if self._policy.knows_worth else 1

    def copy_victim(self) -> Node | None:
        """Remove and return the node whose copies are evicted first; None if there is none."""
        oldest = self._oldest = [each for each in self._oldest if each.ticket == each.item.copy_ticket]
        while (entry := self._copies.pop()) is not None:
            if not self._may_lose_copies(entry.item):
                continue
            if entry.key == _OVER:
                return entry.item
            oldest.append(entry)
            if len(oldest) >= self._num_compared:
                break
        while oldest:
            found = oldest.pop(min(range(len(oldest)), key=lambda at: self._policy.worth(oldest[at].item)))
            if self._may_lose_copies(found.item):
                return found.item
        return None

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
        self.offer_copies(node)

    def offer_above(self, node: Node) -> None:
        """Queue the nodes above that have no leases any more. On the device, only the lowest of them may be a leaf."""
        was_here = self.is_here(node)
        for above in path_to(node)[1:]:
            if above.level:
                break
            self.offer_copies(above)
            if not was_here and self._is_last_here(above):
                self.offer_here(above)
            was_here = self.is_here(above)

    def offer_copies(self, node: Node) -> None:
        """Queue a node if its copies may be evicted. Whether a child has copies is looked at when its turn comes: the
        shared page of many prompts is offered with each of them."""
        if self._has_copies(node):
            node.copy_ticket = next(self._tickets)
            self._copies.push(node.copy_ticket, node, _OVER if node.is_over else node.last_used)

    def _has_copies(self, node: Node) -> bool:
        """Whether a node has copies and no leases."""
        return not node.level and bool(node.run) and self.num_copies(node) > 0

    def _may_lose_copies(self, node: Node) -> bool:
        """Whether a node has copies and no leases, and no child has copies."""
        return self._has_copies(node) and not _has_child(node, self.num_copies)

    def _is_last_here(self, node: Node) -> bool:
        """Whether a node is on the device, and no child is."""
        return self.is_here(node) and not _has_child(node, self.is_here)


def _queued(ticket: int, node: Node) -> Node | None:
    return node if ticket == node.copy_ticket and node.run else None  # one without pages was removed


def _has_child(node: Node, has: Callable[[Node], object]) -> bool:
    """Whether a child has something, the last one first: the one that has it is the last from now on."""
    children = node.children
    for first, child in reversed(children.items()):
        if has(child):
            children[first] = children.pop(first)
            return True
    return False
