"""TieredRadixCache: the tree where pages may have copies below the device.

A page that leaves the device stays in the tree, under its id, while it has a copy below. Pages on the device come first
on every path; copies may be anywhere on it, but of one edge they are its first pages:

    root --[here, kept]--> node --[here, kept | here]--> node            on the device
                             \\--[kept]--> node --[kept]--> node          below only: loaded before they are used

What is evicted from a tier are the ends of its paths. It decides; the cache moves bytes and frees frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.prefix.ghosts import Eviction
from quire.prefix.match import Insertion, Match
from quire.prefix.node import ID_BYTES, Lease, Node
from quire.prefix.radix_cache import RadixCache, join_ids
from quire.spec.ids import Bools, Ids, Tier


class Evicted(NamedTuple):
    """Ids of pages that are `removed` from the tree, and of pages that were `moved`: they stay in the tree, and are not
    in the tier that was evicted any more."""

    removed: Ids
    moved: Ids


class TieredRadixCache(RadixCache):
    """See the module. What `RadixCache` counts as its pages are those on the device."""

    # -- keeping while bytes are moved

    def pin(self, node: Node) -> Lease:
        """Keep a path while its bytes are moved. No use of it: nothing is counted or stamped."""
        self._hold(node)
        return Lease(node, node.depth + node.num_pages, node.priority)

    def pin_path(self, match: Match, num_pages: int) -> Lease:
        """As `pin`, the first `num_pages` pages of a match that is current."""
        return self.pin(self._end_of(match, num_pages))

    def pin_part(self, lease: Lease, num_pages: int) -> Lease:
        """As `pin`, the first `num_pages` pages, at least one, of a path that is pinned already."""
        node: Node | None = lease.node
        while node is not None and node.depth >= num_pages:
            node = node.parent
        assert node is not None and node.parent is not None
        if num_pages - node.depth < node.num_pages:
            node = self._split(node, num_pages - node.depth)
        return self.pin(node)

    def unpin(self, lease: Lease) -> None:
        """Give back a lease that `pin` gave. Raises LeaseError the second time."""
        node = lease.close()
        self._let_go(node)
        self._offer(node)

    # -- shrinking

    def evict(self, num_pages: int, cause: str = "") -> Ids:
        """Forget up to `num_pages` pages that are on the device, with their copies and what hangs behind them."""
        if not self._has_copies:
            return super().evict(num_pages, cause)
        return self.evict_device(num_pages, cause, lambda node: 0).removed

    def evict_device(self, num_pages: int, cause: str, keep: Callable[[Node], int] | None) -> Evicted:
        """Take up to `num_pages` pages that no lease holds off the device, in the policy's order.

        A leaf loses its tail first, and only as much of it as is needed. O(leaves evicted), and what the policy takes
        to choose them. `cause` says for whom, to those who ask later. `keep(node)` makes copies below of a node's pages
        that have none, as far as it can, and returns how many of its first pages have one. These stay in the tree; the
        rest, and what hangs behind it, is forgotten. Without `keep` no more copies are made.
        """
        removed: list[bytes] = []
        moved: list[bytes] = []
        left = num_pages
        eviction = Eviction(cause, self._clock, self._seconds())
        while left > 0 and (node := self._policy.victim()) is not None:
            taken = min(left, node.num_pages)
            left -= taken
            if keep is None and node.kept <= node.num_pages - taken:
                removed += self._cut_below(node, eviction)
                self.num_pages -= taken
                removed.append(self._cut(node, node.num_pages - taken, eviction))
                continue
            if taken < node.num_pages:
                self._split(node, node.num_pages - taken)
            kept = node.kept if keep is None else keep(node)
            if kept < taken:
                removed += self._cut_below(node, eviction)
                self.num_pages -= taken - kept
                removed.append(self._cut(node, kept, eviction))
            if kept:
                moved.append(self._leave(node))
        return Evicted(join_ids(removed), join_ids(moved))

    def evict_lower(self, num_pages: int, cause: str = "") -> Evicted:
        """Give up copies below of up to `num_pages` pages that no lease holds, those used longest ago first, and those
        at the end of a path before those above them. Pages that are on the device lose the copy only (`moved`); the
        others are forgotten (`removed`)."""
        removed: list[bytes] = []
        moved: list[bytes] = []
        left = num_pages
        eviction = Eviction(cause, self._clock, self._seconds())
        while left > 0 and (node := self._lower.victim()) is not None:
            taken = min(left, node.kept)
            left -= taken
            if node.here:
                cut = node.kept - taken
                moved.append(node.run[cut * ID_BYTES : node.kept * ID_BYTES])
                self._copied(node, cut)
            else:
                self.num_below -= taken
                removed.append(self._cut(node, node.num_pages - taken, eviction))
        return Evicted(join_ids(removed), join_ids(moved))

    def discard(self, node: Node, start: int) -> Ids | None:
        """Forget a node's pages from its page `start` on, and everything below; returns the ids of all of them. None,
        and nothing has changed, where a lease holds any."""
        if node.level:
            return None
        eviction = Eviction("", self._clock, self._seconds())
        removed = self._cut_below(node, eviction)
        if node.here:
            self.num_pages -= node.num_pages - start
        else:
            self.num_below -= node.num_pages - start
        removed.append(self._cut(node, start, eviction))
        return join_ids(removed)

    # -- the tier below

    def arrive(self, lease: Lease, num_pages: int) -> None:
        """The first `num_pages` pages of a leased path are on the device from now on, or on their way there."""
        node: Node | None = lease.node
        while node is not None and node.depth >= num_pages and node.parent is not None:
            node = node.parent
        if node is not None and not node.here:
            if node.depth + node.num_pages > num_pages:
                node = self._split(node, num_pages - node.depth)
            self._arrive_above(node)

    def keep(self, lease: Lease, start: int, stop: int) -> int:
        """Pages `start..stop - 1` of a pinned path have copies below now. Returns up to which page they count: of one
        edge, only copies without a gap before them do."""
        path: list[Node] = []
        node: Node | None = lease.node
        while node is not None and node.parent is not None and node.depth + node.num_pages > start:
            if node.depth < stop:
                path.append(node)
            node = node.parent
        for node in reversed(path):
            if start - node.depth > node.kept:
                return start
            end = min(stop - node.depth, node.num_pages)
            if end > node.kept:
                self._copied(node, end)
            start = node.depth + end
        return start

    def kept_on(self, lease: Lease) -> Bools:
        """Per page of a pinned path: whether it has a copy below that counts."""
        runs = []
        node: Node | None = lease.node
        while node is not None:
            runs.append(np.arange(node.num_pages) < node.kept)
            node = node.parent
        return np.concatenate(runs[::-1])

    def graft(self, lease: Lease, tokens: Ids, pages: Ids) -> Insertion:
        """Cache `tokens` (whole pages) behind a pinned path, in pages that are below only, and move the pin there.

        As `insert`, but that nothing arrives on the device.
        """
        data = tokens.tobytes()
        start = lease.node
        node, runs, at = self._follow(start, data)
        depth = at // self._page_bytes
        if at < len(data):
            fresh = pages[depth:].tobytes()
            runs.append(fresh)
            node = self._hang(node, lease, data[at:], fresh, here=False)
        if node is not start:
            self._hold(node)
            self._let_go(start)
        lease.move_to(node, lease.num_pages + len(pages))
        return Insertion(join_ids(runs), pages[:depth])

    # -- looking

    def queued_lower(self) -> set[Node]:
        """Nodes whose copies below could be evicted."""
        return set(self._lower.candidates())

    # -- inside

    def _evict_all(self) -> Ids:
        here = self.evict(self.num_pages)
        return np.concatenate((here, self.evict_lower(self.num_below).removed))

    def _offer_lower(self, node: Node) -> None:
        """Queue this node and those above it, where they have copies below, for their eviction if nobody needs them:
        there may be several on one path, since not every page on it has a copy. And queue the last one on the device
        above it, if that is a leaf there now."""
        above: Node | None = node
        was_here = node.here
        while above is not None and above.parent is not None and not above.level:
            if above.kept and not above.num_kept:
                self._lower.offered(above)
            if above.here and not was_here and not above.num_here:
                self._policy.offered(above)
            was_here = above.here
            above = above.parent

    def _leave(self, node: Node) -> bytes:
        """An unleased node's pages, which have copies, are not on the device any more; returns their ids. It has no
        child that is."""
        parent = node.parent
        assert parent is not None and node.kept == node.num_pages
        self.version += 1
        node.here = False
        node.ticket = 0
        parent.num_here -= 1
        self.num_pages -= node.num_pages
        self.num_below += node.num_pages
        if self._emit is not None:
            self._tell_removed(node, 0, node.num_pages, Tier.DEVICE)
        self._policy.merged(node, parent)
        parent.last_used = max(parent.last_used, node.last_used)
        parent.priority = max(parent.priority, node.priority)
        self._offer(parent)
        self._offer(node)
        return node.run

    def _cut_below(self, node: Node, eviction: Eviction) -> list[bytes]:
        """Forget everything below an unleased node; returns the ids."""
        below = list(node.children.values())
        for found in below:  # grows while it is walked: parents before children
            below += found.children.values()
        removed = []
        for found in reversed(below):
            if found.here:
                self.num_pages -= found.num_pages
            else:
                self.num_below -= found.num_pages
            removed.append(self._cut(found, 0, eviction))
        return removed
