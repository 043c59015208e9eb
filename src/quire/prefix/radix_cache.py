"""RadixCache: which prefixes are cached, in which pages, and which are evicted.

There is one tree per namespace. An edge is a run of whole pages:

    root --[page page page]--> node --[page page]--> node (leaf)
                                \\--[page]----------> node (leaf)

A page that leaves the device stays in the tree under its id, while it has a copy on a lower tier. On every path the
pages on the device come first, and only an edge's first pages have copies. A tier evicts from the ends of its paths:

    root --[device, copies]--> node --[device]--> node                   on the device
                                \\--[copies]--> node --[copies]--> node   below only: loaded before they are used
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from quire.errors import LeaseError
from quire.prefix.hashing import cut_hashes
from quire.prefix.match import Evicted, Insertion, Match, find
from quire.prefix.node import (
    ID_BYTES,
    TOKEN_BYTES,
    EvictedEdges,
    Eviction,
    Lease,
    Levels,
    Node,
    User,
    attach,
    common_pages,
    join_ids,
    nodes_below,
    path_to,
    used_by,
)
from quire.prefix.page_names import PageNames
from quire.prefix.placement import NodeTiers, Placement
from quire.prefix.policy import EvictionPolicy
from quire.prefix.tenant_policies import ONE_TENANT, TenantShares
from quire.spec.events import CacheEvent, Namespace, PagesRemoved, PagesStored
from quire.spec.ids import Ids, Tier

Give = Callable[[Ids], None]
"""Takes pages out of a tier that stay in the tree; they are out when it returns."""
_NO_PAGES: Ids = np.empty(0, dtype=np.int32)


class RadixCache:
    """Radix trees of page ids. The tree never frees a page: the caller owns the ids that its methods return as removed.

    `emit` receives an event when pages can be reused, and when they cannot any more. `num_named` page ids have keys,
    for tiers. With neither, no page is hashed. `identity` represents the model and the layouts: every hash depends on
    it. The last `remembered` evicted tokens are stored as evicted edges, with the time by `seconds`. Each
    namespace is that of one of the `tenants`; `num_unheld` counts pages on the device that no lease holds, by tenant.
    """

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy,
        *,
        emit: Callable[[CacheEvent], None] | None = None,
        identity: bytes = b"",
        remembered: int = 0,
        seconds: Callable[[], float] = time.monotonic,
        placement: Placement | None = None,
        num_named: int = 0,
        tenants: TenantShares = ONE_TENANT,
    ) -> None:
        self._tiers = tiers = NodeTiers(placement, policy)
        self.is_here, self.num_copies, self.compare_copies = tiers.is_here, tiers.num_copies, tiers.compare_copies
        self.lost, self.ends_by = tiers.lost, tiers.ends_by
        self._has_lower = placement is not None
        self.longest_grown = 1 << 16  # bytes: above these a child is added, since to lengthen an edge copies it
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self.policy = policy
        policy.timed_by(seconds)
        self.names = PageNames(self._page_bytes, identity, emit, num_named)
        self._seconds, self.tenants = seconds, tenants
        self.roots: dict[Namespace, Node] = {}
        self.hidden_roots: list[Node] = []  # roots of flushed namespaces, while a lease holds pages below
        self.evicted = EvictedEdges(remembered * TOKEN_BYTES, self._page_bytes, self._drop_root)
        self._clock = 0
        self.version = 0  # changes when an earlier `Match` becomes invalid
        self.num_releases = 0  # leases and pins that were released
        self._levels = Levels(self.is_here if self._has_lower else None, tenants.num_tenants)
        self.num_unheld = self._levels.num_unheld
        self.num_pages = 0  # on the device
        self.num_below = 0  # pages that have a copy on lower tiers only

    @property
    def num_evictable(self) -> int:
        """Pages on the device that no lease holds."""
        return self.num_pages - self._levels.num_held[1]

    @property
    def num_protected(self) -> int:
        """Pages on the device that at least one lease holds."""
        return self._levels.num_held[1]

    @property
    def num_shared(self) -> int:
        """Pages on the device that at least two leases hold."""
        return self._levels.num_held[2]

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace, created if it has none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, None, b"", b"", 0, self._clock)
            root.tenant = self.tenants.number(namespace)
        return root

    # -- finding

    def match(self, namespace: Namespace, tokens: Ids) -> Match:
        """The longest cached prefix of `tokens` in whole pages. Changes nothing. O(edges + bytes compared)."""
        pages, path = find(self.roots.get(namespace), tokens, self.page_size)
        num_here = len(pages)
        if self._has_lower and path and not self.is_here(path[-1]):
            num_here = next(node.depth for node in path if not self.is_here(node))
        return Match(namespace, pages, len(pages), path, self.version, num_here)

    def lease(
        self, match: Match, num_pages: int | None = None, *, priority: int = 0, user: User | None = None
    ) -> Lease:
        """Pin the first `num_pages` pages of a match (default: all) and count a hit on them, by a request of `user`.
        Raises LeaseError if the match is not valid any more."""
        wanted = match.num_pages if num_pages is None else num_pages
        node = self._end_of(match, wanted)
        self._clock += 1
        node.last_used = self._clock
        node.hits += 1
        node.priority = max(node.priority, priority)
        used_by(node, user)
        self.policy.used(node)
        self._levels.hold(node)
        return Lease(node, wanted, priority, node.turn + 1, user=user)

    def use(self, lease: Lease, priority: int) -> None:
        """Another request goes on with a lease: count a hit on its path."""
        node = lease.node
        self._clock += 1
        node.last_used = self._clock
        node.hits += 1
        node.priority = max(node.priority, priority)
        self.policy.used(node)
        lease.priority, lease.turn = priority, node.turn + 1

    def release(self, lease: Lease) -> None:
        """Release a lease or a pin. Raises LeaseError the second time."""
        node, lease.end = lease.node, None
        self.num_releases += 1
        if lease.counts:
            self._clock += 1
            node.last_used = self._clock
        self._levels.release(node)
        self.offer(node)
        if self._has_lower and not node.level:
            self._tiers.offer_above(node)

    def pin(self, node: Node) -> Lease:
        """Lease the path to a node. A pin does not count as a use."""
        self._levels.hold(node)
        return Lease(node, node.depth + node.num_pages, node.priority, node.turn + 1, counts=False)

    def pin_path(self, match: Match, num_pages: int) -> Lease:
        """Pin the first `num_pages` pages of a match. Raises LeaseError if it is not valid any more."""
        return self.pin(self._end_of(match, num_pages))

    def pin_part(self, lease: Lease, num_pages: int) -> Lease:
        """Pin the first `num_pages` pages, at least one, of a leased path."""
        return self.pin(self._ending(path_to(lease.node), num_pages))

    # -- growing

    def insert(self, lease: Lease, tokens: Ids, pages: Ids) -> Insertion:
        """Cache `tokens` (whole pages) after the leased path, and move the lease to their end.

        Pages on the path that had a copy on lower tiers only come to the device: the caller gives them frames before
        its next call of the tree. The tree takes over the caller's `pages` for the tokens that were not cached yet:

            leased path | tokens that another request cached | new tokens
                        | tree's pages stay; caller's pages  | caller's pages
                        | are `duplicates`                   | become the tree's
        """
        self._clock += 1
        node, insertion = self._grow(lease, tokens, pages, here=True)
        if self._has_lower:
            for above in reversed([above for above in path_to(node) if not self.is_here(above)]):
                self._arrive(above)
        node.last_used = self._clock
        node.priority = max(node.priority, lease.priority)
        return insertion

    def graft(self, lease: Lease, tokens: Ids, pages: Ids) -> Insertion:
        """As `insert`, with pages that have copies on lower tiers only: the caller gives them host frames before its
        next call of the tree. No page comes to the device or counts as used."""
        return self._grow(lease, tokens, pages, here=False)[1]

    def ended(self, lease: Lease, tail: Ids, num_generated: int) -> object | None:
        """The request of a lease has ended with `tail`, less than a page of tokens, after the leased path. Returns what
        the policy has of it (`EvictionPolicy.ended`)."""
        node = lease.node
        node.answer = max(0, num_generated)
        node.ending = (tail.tobytes() or node.key)[-TOKEN_BYTES:] if num_generated > 0 else b""
        if self.evicted.capacity:
            node.tail = tail.tobytes()
        return self.policy.ended(node)

    def end(self, user: User) -> None:
        """No request of this user follows: nodes that it alone has used are the first to be evicted, from now on or
        when their leases end. A request that uses them before takes that back. O(these nodes)."""
        self._tiers.end(user)

    # -- shrinking

    def evict(self, num_pages: int, cause: str = "") -> Ids:
        """Remove up to `num_pages` pages on the device that no lease holds, in the policy's order, with their copies
        and all pages below them in the tree; returns all of them. A leaf loses its last pages first, and with them
        those that no request can begin after then. O(leaves evicted), plus the policy. `cause` is for explanations."""
        removed: list[bytes] = []
        eviction = self._eviction(cause)
        while num_pages > 0 and (node := self._tiers.victim()) is not None:
            most = self.policy.most(node)
            keep = self._tiers.cut(node, node.num_pages - min(num_pages, most), most)
            num_pages -= node.num_pages - keep
            self._forget(node, keep, eviction, removed)
        return join_ids(removed)

    def demote(self, num_pages: int, cause: str, keep: Callable[[Node], int] | None, leave: Give) -> Evicted:
        """As `evict`, but pages that have copies stay in the tree, and `leave` frees their device frames. `keep(node)`
        copies pages of a node that have no copy, as far as possible, and returns how many of its first pages have one.
        The other pages, and all below them, are removed. Without `keep` no copies are made."""
        removed: list[bytes] = []
        num_moved = 0
        eviction = self._eviction(cause)
        while num_pages > 0 and (node := self._tiers.victim()) is not None:
            above = node.num_pages - min(num_pages, self.policy.most(node))
            if keep is None and self.num_copies(node) <= above:
                above = self._tiers.cut(node, above, self.policy.most(node))
                num_pages -= node.num_pages - above
                self._forget(node, above, eviction, removed)
                continue
            num_pages -= node.num_pages - above
            if above:
                self._split(node, above)
            kept = self.num_copies(node) if keep is None or node.goes_first else keep(node)
            if kept < node.num_pages:
                self._forget(node, kept, eviction, removed)
            if kept:
                num_moved += kept
                self._leave(node, leave)
        return Evicted(join_ids(removed), num_moved)

    def evict_lower(self, num_pages: int, leave: Give, cause: str = "") -> Evicted:
        """Remove copies of up to `num_pages` pages that no lease holds, in the order of `NodeTiers`. Pages on
        the device stay there, and `leave` frees their copies; the others are removed."""
        removed: list[bytes] = []
        num_moved = 0
        eviction = self._eviction(cause)
        while num_pages > 0 and (node := self._tiers.copy_victim()) is not None:
            copies = self.num_copies(node)
            keep = max(0, copies - num_pages)
            num_pages -= copies - keep
            if self.is_here(node):
                num_moved += copies - keep
                self.names.tell(PagesRemoved, node, keep, copies, Tier.HOST)
                leave(node.pages[keep:copies])
                self._tiers.offer_copies(node if keep or node.parent is None else node.parent)
            else:
                self._forget(node, keep, eviction, removed)
        return Evicted(join_ids(removed), num_moved)

    def discard(self, node: Node, start: int) -> Ids | None:
        """Remove a node's pages from page `start` on, and all nodes below; returns the ids, or None if it is leased."""
        if node.level:
            return None
        removed: list[bytes] = []
        self._forget(node, start, self._eviction(""), removed)
        return join_ids(removed)

    # -- flushing

    def flush(self, namespace: Namespace) -> tuple[Ids, int]:
        """Remove every page of `namespace`, in every tier, and its evicted edges. Returns the pages that no lease
        holds, and the number of others. No prompt matches those any more, and `sweep` returns them later."""
        root = self.roots.get(namespace)
        if root is None:
            return _NO_PAGES, 0
        pages = self._forget_unheld(root)
        if namespace not in self.roots:
            return pages, 0
        self.version += 1
        self.hidden_roots.append(self.roots.pop(namespace))
        held = nodes_below(root)
        for node in reversed(held):
            self._tell_gone(node, 0)  # drops the hashes, so that later removals emit nothing
        return pages, sum(node.num_pages for node in held)

    def sweep(self) -> Ids:
        """Remove flushed pages that no lease holds any more, and return them. O(flushed nodes that are left)."""
        return np.concatenate([_NO_PAGES, *map(self._forget_unheld, list(self.hidden_roots))])

    # -- tiers

    def arrive(self, lease: Lease, start: int, stop: int) -> None:
        """Pages `start..stop - 1` of a leased path come to the device; the caller gives them frames at once."""
        coming = [node for node in path_to(lease.node) if start <= node.depth < stop]
        if coming and coming[0].depth + coming[0].num_pages > stop:
            coming[0] = self._split(coming[0], stop - coming[0].depth)
        for node in reversed(coming):
            self._arrive(node)

    def countable(self, lease: Lease, start: int, stop: int) -> int:
        """How far copies of pages `start..stop - 1` of a pinned path count: while all pages of an edge have one."""
        for node in reversed(path_to(lease.node)):
            if node.depth >= stop:
                break
            if node.depth + node.num_pages > start:
                if start - node.depth > self.num_copies(node):
                    return start
                start = min(stop, node.depth + node.num_pages)
        return start

    def copied(self, lease: Lease, start: int, stop: int) -> None:
        """Pages `start..stop - 1` of a pinned path have copies now that count and did not count before."""
        for node in reversed(path_to(lease.node)):
            if node.depth < stop and node.depth + node.num_pages > start:
                first, end = max(0, start - node.depth), min(node.num_pages, stop - node.depth)
                self.names.tell(PagesStored, node, first, end, Tier.HOST)

    def tell_all(self) -> None:
        """Emit that nothing is cached, then all that is, for readers who missed events. O(nodes)."""
        self.names.cleared()
        for root in self.roots.values():
            for node in nodes_below(root):
                if self.is_here(node):
                    self.names.tell(PagesStored, node, 0, node.num_pages, Tier.DEVICE)
                self.names.tell(PagesStored, node, 0, self.num_copies(node), Tier.HOST)

    # -- reading, for audits and statistics

    def nodes(self) -> Iterator[Node]:
        """All nodes except roots, parents before children."""
        for root in self.all_roots():
            yield from nodes_below(root)

    def all_roots(self) -> list[Node]:
        """All roots, with those of flushed namespaces that are still in use."""
        return [*self.roots.values(), *self.hidden_roots]

    def queued(self, tier: Tier = Tier.DEVICE) -> set[Node]:
        """Nodes that could be evicted from a tier. O(entries of its queues)."""
        return set(self._tiers.candidates() if tier is Tier.DEVICE else self._tiers.copy_candidates())

    def _end_of(self, match: Match, num_pages: int) -> Node:
        """The node at the end of a match's first `num_pages` pages. Splits an edge if they end inside it."""
        if match.version != self.version:
            raise LeaseError("a match was leased after the tree had changed; match again.")
        assert num_pages <= match.num_pages
        if not num_pages:
            return self.root(match.namespace)
        return self._ending(reversed(match.path), num_pages)

    def _ending(self, path: Iterable[Node], num_pages: int) -> Node:
        """The node at the end of the first `num_pages` pages, at least one; the end of `path` comes first."""
        node = next(node for node in path if node.depth < num_pages)
        if num_pages - node.depth < node.num_pages:
            return self._split(node, num_pages - node.depth)
        return node

    def _grow(self, lease: Lease, tokens: Ids, pages: Ids, *, here: bool) -> tuple[Node, Insertion]:
        """Cache `tokens` after a lease, and move it to the returned node."""
        data, page_bytes = tokens.tobytes(), self._page_bytes
        assert len(data) == len(pages) * page_bytes
        node, at = lease.node, 0
        runs: list[bytes] = []
        while at < len(data) and (child := node.children.get(data[at : at + page_bytes])) is not None:
            if data.startswith(child.key, at):
                node = child
            else:
                node = self._split(child, common_pages(data, at, child.key, page_bytes) // page_bytes)
            runs.append(node.run)
            at += len(node.key)
        depth = at // page_bytes
        if here and depth:
            used_by(node, lease.user)
            self.policy.used(node)
        if at < len(data):
            runs.append(pages[depth:].tobytes())
            node = self._append(node, lease, data[at:], runs[-1], here=here)
        if node is not lease.node:
            self._levels.hold(node)
            self._levels.release(lease.node)
        lease.end = node
        lease.num_pages += len(pages)
        return node, Insertion(join_ids(runs) if depth else pages, pages[:depth])

    def _split(self, node: Node, at: int) -> Node:
        """Split an edge after its first `at` pages and return the new upper part, which gets the same level. The lower
        part is the old node, so its leases stay valid."""
        assert 0 < at < node.num_pages and node.parent is not None
        self.version += 1
        parent, cut = node.parent, at * self._page_bytes
        upper = Node(node.namespace, parent, node.key[:cut], node.run[: at * ID_BYTES], node.depth, node.created)
        upper.answer, upper.memo, upper.tenant = node.answer, node.memo, node.tenant
        upper.held = upper.level = node.level
        upper.hits, upper.last_used, upper.priority = node.hits, node.last_used, node.priority
        upper.user = node.user
        if upper.user is not None:
            upper.user.nodes[upper] = None
        upper.turn = parent.turn + 1
        upper.hashes, node.hashes = cut_hashes(node.hashes, at)
        parent.children[upper.key[: self._page_bytes]] = upper
        node.parent = upper
        node.key = node.key[cut:]
        node.run = node.run[at * ID_BYTES :]
        node.depth += at
        upper.children[node.key[: self._page_bytes]] = node
        if self._has_lower:
            self._tiers.offer_copies(upper)
        return upper

    def _append(self, node: Node, lease: Lease, data: bytes, run: bytes, *, here: bool) -> Node:
        """Lengthen the edge of `node` if only this lease holds it; else add new nodes below."""
        count = len(run) // ID_BYTES
        if not here:
            self.num_below += count
            return self._add_nodes(node, lease, data, run, Tier.HOST)
        self.num_pages += count
        is_shared = node is not lease.node or node.children or node.evicted or node.held > 1
        is_shared = is_shared or node.user is not lease.user
        if is_shared or node.parent is None or len(node.key) > self.longest_grown:
            node.ticket = 0
            self.num_unheld[node.tenant] += count  # until `_grow` holds them
            return self._add_nodes(node, lease, data, run, Tier.DEVICE)
        self.names.appended(node, node, data, run, Tier.DEVICE)
        node.key += data
        node.run += run
        node.tail = node.ending = b""
        self._levels.num_held[1] += count
        self.policy.stored(node, count, [])
        return node

    def _add_nodes(self, node: Node, lease: Lease, data: bytes, run: bytes, tier: Tier) -> Node:
        """Add pages below `node`: one node, or several, since an edge ends where other evicted edges begin."""
        while data:
            size, below, returned = self.evicted.returning(node, data)
            pages = size // self._page_bytes * ID_BYTES
            leaf = Node(node.namespace, node, data[:size], run[:pages], node.depth + node.num_pages, self._clock)
            attach(leaf, below)
            if returned:
                lease.turn = max(lease.turn, returned[-1][0].turn + 1)
            leaf.turn, leaf.last_used, leaf.tenant = lease.turn, self._clock, node.tenant
            leaf.user = user = lease.user if tier is Tier.DEVICE else node.user
            if user is not None:
                user.nodes[leaf] = None
                if any(edge.user is not user and not edge.is_over for edge, _ in returned):
                    used_by(leaf, None)
            self.names.appended(leaf, node, leaf.key, leaf.run, tier)
            node.children[leaf.key[: self._page_bytes]] = leaf
            self.policy.stored(leaf, leaf.num_pages, returned)
            node, data, run = leaf, data[size:], run[pages:]
        return node

    def _eviction(self, cause: str) -> Eviction:
        return Eviction(cause, self._clock, self._seconds())

    def _forget(self, node: Node, keep: int, eviction: Eviction, removed: list[bytes]) -> None:
        """Remove all but the first `keep` pages of a node without leases, and all nodes below; adds to `removed`."""
        if node.children:
            removed += [self._cut(found, 0, eviction) for found in reversed(nodes_below(node))]
        removed.append(self._cut(node, keep, eviction))

    def _cut(self, node: Node, keep: int, eviction: Eviction) -> bytes:
        """Cut a leaf without leases to its first `keep` pages, or remove it if 0. Returns the other ids."""
        parent = node.parent
        assert parent is not None
        self.version += 1
        self._tell_gone(node, keep)
        if self._has_lower and not self.is_here(node):
            self.num_below -= node.num_pages - keep
        else:
            self.num_pages -= node.num_pages - keep
            self.num_unheld[node.tenant] -= node.num_pages - keep
        run = node.run[keep * ID_BYTES :]
        node.run = node.run[: keep * ID_BYTES]
        if keep:
            self._cut_key(node, keep * self._page_bytes, eviction)
            self.offer(node)
            return run
        del parent.children[node.key[: self._page_bytes]]
        node.ticket = 0
        if node.user is not None:
            node.user.nodes.pop(node, None)
        if self.evicted.capacity:
            node.eviction = eviction
            self.evicted.add(node, parent)
        self.policy.merged(node, parent)
        parent.hits += node.hits
        parent.last_used = max(parent.last_used, node.last_used)
        parent.priority = max(parent.priority, node.priority)
        self.offer(parent)
        return run

    def _cut_key(self, node: Node, at: int, eviction: Eviction) -> None:
        """Cut an edge's tokens to the first `at` bytes; the others become an evicted edge at its end."""
        if self.evicted.capacity:
            edge = Node(node.namespace, node, node.key[at:], b"", 0, node.created)
            edge.turn, edge.memo, edge.tail, edge.eviction = node.turn, node.memo, node.tail, eviction
            edge.user, edge.tenant = node.user, node.tenant
            attach(edge, node.evicted)
            node.evicted = {}
            self.evicted.add(edge, node)
        node.tail = node.ending = b""
        node.key = node.key[:at]

    def _forget_unheld(self, root: Node) -> Ids:
        """Remove a root's nodes without leases, its evicted edges, and then the root if it is empty."""
        removed: list[bytes] = []
        eviction = self._eviction("")
        held = [root]
        for node in held:  # grows while it is walked
            for child in list(node.children.values()):
                if child.level:
                    held.append(child)
                else:
                    self._forget(child, 0, eviction, removed)
        self.evicted.forget_below(held)
        self.offer(root)
        return join_ids(removed)

    def offer(self, node: Node) -> None:
        """Queue a node for eviction if it is a leaf without leases; remove an unused root."""
        if node.level:
            return
        if node.parent is None:
            self._drop_root(node)
        elif self._has_lower:
            self._tiers.offer(node)
        elif not node.children:
            self._tiers.offer_here(node)

    def _drop_root(self, node: Node) -> None:
        """Remove it if it is an unused root."""
        if node.parent is not None or node.level or node.children or node.evicted:
            return
        if self.roots.get(node.namespace) is node:
            del self.roots[node.namespace]
        elif node in self.hidden_roots:
            self.hidden_roots.remove(node)

    def _arrive(self, node: Node) -> None:
        """A leased node comes to the device, which has its parent."""
        parent = node.parent
        assert parent is not None
        first = node.key[: self._page_bytes]
        parent.children[first] = parent.children.pop(first)
        parent.ticket = 0
        count = node.num_pages
        self.num_pages += count
        self.num_below -= count
        for level in range(1, node.level + 1):
            self._levels.num_held[level] += count
        self.names.tell(PagesStored, node, 0, count, Tier.DEVICE)

    def _leave(self, node: Node, leave: Give) -> None:
        """A node without leases leaves the device. All its pages have copies, and it has no child on the device."""
        parent = node.parent
        assert parent is not None
        self.version += 1
        node.ticket = 0
        self.num_pages -= node.num_pages
        self.num_unheld[node.tenant] -= node.num_pages
        self.num_below += node.num_pages
        self.names.tell(PagesRemoved, node, 0, node.num_pages, Tier.DEVICE)
        leave(node.pages)
        self.policy.merged(node, parent)
        parent.last_used = max(parent.last_used, node.last_used)
        parent.priority = max(parent.priority, node.priority)
        self.offer(parent)
        self.offer(node)

    def _tell_gone(self, node: Node, keep: int) -> None:
        """Emit that all but the first `keep` pages of a node are in no tier any more."""
        if node.hashes:
            if self.is_here(node):
                self.names.tell(PagesRemoved, node, keep, node.num_pages, Tier.DEVICE)
            self.names.tell(PagesRemoved, node, keep, self.num_copies(node), Tier.HOST)
            node.hashes = cut_hashes(node.hashes, keep)[0]
