"""RadixCache: which prefixes are cached, in which pages, and which may go. It decides; the cache executes.

One tree per namespace. An edge is a run of whole pages: its tokens as raw int32 bytes, and their page ids. Children are
found by the bytes of their first page. The tree never frees a page: the caller gives back the ids that it returns.

    root --[page page page]--> node --[page page]--> node (leaf)
                                \\--[page]----------> node (leaf)

A leased node and everything above it stays. The rest can be evicted leaf by leaf, so `num_evictable` counts it all.

A page that leaves the device stays in the tree, under its id, while it has a copy below. Pages on the device come first
on every path; of one edge, copies are those of its first pages:

    root --[device, copies]--> node --[device]--> node                   on the device
                                \\--[copies]--> node --[copies]--> node   below only: loaded before they are used

What is evicted from a tier are the ends of its paths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from quire.errors import LeaseError
from quire.prefix.ghosts import Ghosts, hang
from quire.prefix.hashing import cut_hashes
from quire.prefix.match import Evicted, Insertion, Match, find
from quire.prefix.node import (
    ID_BYTES,
    TOKEN_BYTES,
    Eviction,
    Lease,
    Levels,
    Node,
    common_pages,
    join_ids,
    nodes_below,
    path_to,
)
from quire.prefix.page_names import PageNames
from quire.prefix.placement import Placement, Whereabouts
from quire.prefix.policy import EvictionPolicy
from quire.spec.events import CacheEvent, Namespace
from quire.spec.ids import Ids, Tier

Give = Callable[[Ids], None]
"""Called with pages that stay in the tree and leave a tier: on return they have."""
_NO_PAGES: Ids = np.empty(0, dtype=np.int32)
_LONGEST_GROWN = 1 << 16  # bytes: a longer edge is not lengthened, because that copies it


class RadixCache:
    """One radix tree for every kind of memory: it holds page ids, and looks up where their bytes are.

    `emit` receives an event for every page that becomes or stops being reusable. `names` has the keys of `num_named`
    page ids, for tiers. With neither no page is ever hashed. `identity` is what hashes begin with, so that caches of
    different models or layouts never name their pages alike.
    Of what is evicted, the newest `remembered` tokens are kept as ghosts; `seconds` is the clock that says when.
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
    ) -> None:
        self._where = Whereabouts(placement, policy)
        self._has_lower = placement is not None
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._policy = policy
        self.names = PageNames(self._page_bytes, identity, emit, num_named)
        self._seconds = seconds
        self.roots: dict[Namespace, Node] = {}  # what prompts are matched against
        self.hidden_roots: list[Node] = []  # flushed; they stay while a lease holds something below them
        self.ghosts = Ghosts(remembered * TOKEN_BYTES, self._page_bytes, self._drop_root)
        self._clock = 0
        self.version = 0  # changes whenever a `Match` taken before may no longer be followed
        self._levels = Levels(self._where.is_here if self._has_lower else None)
        self.num_pages = 0  # on the device
        self.num_below = 0  # pages that have a copy below only

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could take off the device: all there that no lease holds."""
        return self.num_pages - self._levels.num_held[1]

    @property
    def num_protected(self) -> int:
        """Pages on the device that at least one lease holds."""
        return self._levels.num_held[1]

    @property
    def num_shared(self) -> int:
        """Of these, pages that at least two hold."""
        return self._levels.num_held[2]

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace, made where it has none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, None, b"", b"", 0, self._clock)
        return root

    # -- finding

    def match(self, namespace: Namespace, tokens: Ids) -> Match:
        """The longest cached prefix of `tokens` in whole pages. Changes nothing. O(edges + bytes compared)."""
        pages, path = find(self.roots.get(namespace), tokens, self.page_size)
        num_here = len(pages)
        if self._has_lower and path and not self.is_here(path[-1]):
            num_here = next(node.depth for node in path if not self.is_here(node))
        return Match(namespace, pages, len(pages), path, self.version, num_here)

    def lease(self, match: Match, num_pages: int | None = None, *, priority: int = 0) -> Lease:
        """Pin the first `num_pages` pages of a match (all of them by default) and count a hit on them.

        Splits an edge where the pinned part ends inside it. Raises LeaseError if edges were cut since the match.
        """
        wanted = match.num_pages if num_pages is None else num_pages
        node = self._end_of(match, wanted)
        self._clock += 1
        node.last_used = self._clock
        node.hits += 1
        node.priority = max(node.priority, priority)
        self._policy.used(node)
        self._levels.hold(node)
        return Lease(node, wanted, priority, node.turn + 1)

    def release(self, lease: Lease) -> None:
        """Give a lease or a pin back. What it alone held becomes evictable. Raises LeaseError the second time."""
        node = lease.close()
        if lease.counts:
            self._clock += 1
            node.last_used = self._clock
        self._levels.let_go(node)
        self.offer(node)

    def pin(self, node: Node) -> Lease:
        """Lease the path to a node without using it: nothing is counted or stamped."""
        self._levels.hold(node)
        return Lease(node, node.depth + node.num_pages, node.priority, node.turn + 1, counts=False)

    def pin_path(self, match: Match, num_pages: int) -> Lease:
        """As `pin`, the first `num_pages` pages of a match that is current."""
        return self.pin(self._end_of(match, num_pages))

    def pin_part(self, lease: Lease, num_pages: int) -> Lease:
        """As `pin`, the first `num_pages` pages, at least one, of a path that is leased already."""
        return self.pin(self._ending(path_to(lease.node), num_pages))

    # -- growing

    def insert(self, lease: Lease, tokens: Ids, pages: Ids) -> Insertion:
        """Cache `tokens` (whole pages) after the leased path, and move the lease to their end.

        Pages on its way that had a copy below only come to the device: the caller gives them frames before it asks
        anything else of the tree. The tree takes over the caller's `pages` for what was not cached yet:

            leased path | tokens cached meanwhile by another | new tokens
                        | tree's pages stand; caller's are   | caller's pages
                        | `duplicates`                       | become the tree's
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
        """As `insert`, behind a pinned path and in pages that have copies below only: the caller gives them host frames
        before it asks anything else of the tree. Nothing arrives on the device, and nothing counts as used."""
        return self._grow(lease, tokens, pages, here=False)[1]

    def ended(self, lease: Lease, tail: Ids, num_generated: int) -> None:
        """The lease's request is over: behind its path it had `tail`, less than a page, and it had generated so many
        tokens in all. For those who ask later why no more is cached, and for the policy."""
        node = lease.node
        node.answer = max(0, num_generated)
        if self.ghosts.capacity:
            node.tail = tail.tobytes()

    # -- shrinking

    def evict(self, num_pages: int, cause: str = "") -> Ids:
        """Forget up to `num_pages` pages that are on the device and that no lease holds, in the policy's order, with
        their copies and what hangs behind them; returns all of them.

        A leaf loses its tail first, and only as much of it as is needed. O(leaves evicted), and what the policy takes
        to choose them. `cause` says for whom, to those who ask later.
        """
        removed: list[bytes] = []
        eviction = self._eviction(cause)
        while num_pages > 0 and (node := self._policy.victim()) is not None:
            keep = max(0, node.num_pages - num_pages)
            num_pages -= node.num_pages - keep
            self._forget(node, keep, eviction, removed)
        return join_ids(removed)

    def demote(self, num_pages: int, cause: str, keep: Callable[[Node], int] | None, leave: Give) -> Evicted:
        """Take up to `num_pages` pages that no lease holds off the device, in the policy's order.

        As `evict`, but that pages which have copies stay in the tree; `leave` takes their device frames. `keep(node)`
        makes copies of a node's pages that have none, as far as it can, and returns how many of its first pages have
        one. The rest, and what hangs behind it, is forgotten. Without `keep` no more copies are made.
        """
        removed: list[bytes] = []
        num_moved = 0
        eviction = self._eviction(cause)
        while num_pages > 0 and (node := self._policy.victim()) is not None:
            above = max(0, node.num_pages - num_pages)
            num_pages -= node.num_pages - above
            if keep is None and self.num_copies(node) <= above:
                self._forget(node, above, eviction, removed)
                continue
            if above:
                self._split(node, above)
            kept = self.num_copies(node) if keep is None else keep(node)
            if kept < node.num_pages:
                self._forget(node, kept, eviction, removed)
            if kept:
                num_moved += kept
                self._leave(node, leave)
        return Evicted(join_ids(removed), num_moved)

    def evict_lower(self, num_pages: int, leave: Give, cause: str = "") -> Evicted:
        """Give up copies below of up to `num_pages` pages that no lease holds, those used longest ago first, and those
        at the end of a path before those above them. Pages that are on the device lose the copy only, which `leave`
        takes; the others are forgotten."""
        removed: list[bytes] = []
        num_moved = 0
        eviction = self._eviction(cause)
        while num_pages > 0 and (entry := self._where.copies.pop()) is not None:
            node = entry.item
            copies = self.num_copies(node)
            keep = max(0, copies - num_pages)
            num_pages -= copies - keep
            if self.is_here(node):
                num_moved += copies - keep
                self.names.removed(node, keep, copies, Tier.HOST)
                leave(node.pages[keep:copies])
                self._where.offer_path(node)
            else:
                self._forget(node, keep, eviction, removed)
        return Evicted(join_ids(removed), num_moved)

    def discard(self, node: Node, start: int) -> Ids | None:
        """Forget a node's pages from its page `start` on, and everything below; returns the ids of all of them. None,
        and nothing has changed, where a lease holds any."""
        if node.level:
            return None
        removed: list[bytes] = []
        self._forget(node, start, self._eviction(""), removed)
        return join_ids(removed)

    def clear(self) -> Ids:
        """Forget everything that no lease holds and return its pages; forget what was evicted."""
        pages = np.concatenate((self.evict(self.num_pages), self.evict_lower(self.num_below, _stays).removed))
        self.ghosts.clear()
        if not self.num_pages and not self.num_below:
            self.names.cleared()
        return pages

    # -- flushing: whatever the policy thinks of it

    def flush(self, namespace: Namespace) -> tuple[Ids, int]:
        """Forget every page of `namespace`, in every tier, and what is remembered of those that were evicted before.

        Returns the pages that no lease holds, which are the caller's now, and how many others there are: no prompt
        matches them any more, and they come from `sweep` later. O(nodes and ghosts of the namespace).
        """
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
            self._tell_gone(node, 0)  # and no event tells what becomes of it later
        return pages, sum(node.num_pages for node in held)

    def sweep(self) -> Ids:
        """Forget what was flushed while a lease held it and none does any more; the pages are the caller's. O(what was
        flushed and is left)."""
        return np.concatenate([_NO_PAGES, *map(self._forget_unheld, list(self.hidden_roots))])

    # -- tiers

    def is_here(self, node: Node) -> bool:
        """Whether a node's pages are on the device, or on their way there."""
        return self._where.is_here(node)

    def num_copies(self, node: Node) -> int:
        """How many of a node's pages, from the first on, have copies below the device."""
        return self._where.num_copies(node)

    def arrive(self, lease: Lease, start: int, stop: int) -> None:
        """Pages `start..stop - 1` of a leased path come to the device, those before them are there. The caller gives
        them frames before it asks anything else of the tree."""
        coming = [node for node in path_to(lease.node) if start <= node.depth < stop]
        if coming and coming[0].depth + coming[0].num_pages > stop:
            coming[0] = self._split(coming[0], stop - coming[0].depth)
        for node in reversed(coming):
            self._arrive(node)

    def countable(self, lease: Lease, start: int, stop: int) -> int:
        """Up to which page copies of pages `start..stop - 1` of a pinned path would count: of one edge, only copies
        without a gap before them do."""
        return self._where.countable(path_to(lease.node), start, stop)

    def copied(self, lease: Lease, start: int, stop: int) -> None:
        """Pages `start..stop - 1` of a pinned path have copies below now, which count and did not before."""
        for node in reversed(path_to(lease.node)):
            if node.depth < stop and node.depth + node.num_pages > start:
                self.names.stored(node, max(0, start - node.depth), min(node.num_pages, stop - node.depth), Tier.HOST)
                self._where.offer_path(node)

    # -- looking, for audits and statistics

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        for root in self.all_roots():
            yield from nodes_below(root)

    def all_roots(self) -> list[Node]:
        """Every root, of namespaces that were flushed and are still in use too."""
        return [*self.roots.values(), *self.hidden_roots]

    def queued(self, tier: Tier = Tier.DEVICE) -> set[Node]:
        """Nodes that could be evicted from a tier. O(its queues)."""
        return set(self._policy.candidates() if tier is Tier.DEVICE else self._where.copies)

    # -- inside

    def _end_of(self, match: Match, num_pages: int) -> Node:
        """The node at the end of a match's first `num_pages` pages. Raises LeaseError if edges were cut since."""
        if match.version != self.version:
            raise LeaseError("a match was leased after the tree had changed; match again.")
        assert num_pages <= match.num_pages
        if not num_pages:
            return self.root(match.namespace)
        return self._ending(reversed(match.path), num_pages)

    def _ending(self, path: Iterable[Node], num_pages: int) -> Node:
        """The node at the end of the first `num_pages` pages, at least one, of a path whose end comes first."""
        node = next(node for node in path if node.depth < num_pages)
        if num_pages - node.depth < node.num_pages:
            return self._split(node, num_pages - node.depth)
        return node

    def _grow(self, lease: Lease, tokens: Ids, pages: Ids, *, here: bool) -> tuple[Node, Insertion]:
        """Cache what is not cached yet of `tokens` behind a lease, which ends at the node that is returned now."""
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
            self._policy.used(node)
        if at < len(data):
            runs.append(pages[depth:].tobytes())
            node = self._append(node, lease, data[at:], runs[-1], here=here)
        self._move_lease(lease, node, len(pages))
        return node, Insertion(join_ids(runs) if depth else pages, pages[:depth])

    def _move_lease(self, lease: Lease, node: Node, num_pages: int) -> None:
        """The lease ends at `node` now, so many pages deeper."""
        start = lease.node
        if node is not start:
            self._levels.hold(node)
            self._levels.let_go(start)
        lease.move_to(node, lease.num_pages + num_pages)

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after its first `at` pages and return the new upper part. The lower part keeps its identity, so
        leases on it stay right; the upper part has its level, since whoever holds the lower part holds the upper."""
        assert 0 < at < node.num_pages and node.parent is not None
        self.version += 1
        parent, cut = node.parent, at * self._page_bytes
        upper = Node(node.namespace, parent, node.key[:cut], node.run[: at * ID_BYTES], node.depth, node.created)
        upper.answer, upper.memo = node.answer, node.memo
        upper.held = upper.level = node.level
        upper.hits, upper.last_used, upper.priority = node.hits, node.last_used, node.priority
        upper.turn = parent.turn + 1
        upper.hashes, node.hashes = cut_hashes(node.hashes, at)
        parent.children[upper.key[: self._page_bytes]] = upper
        node.parent = upper
        node.key = node.key[cut:]
        node.run = node.run[at * ID_BYTES :]
        node.depth += at
        upper.children[node.key[: self._page_bytes]] = node
        if self._has_lower:
            self._where.offer_copies(upper)
        return upper

    def _append(self, node: Node, lease: Lease, data: bytes, run: bytes, *, here: bool) -> Node:
        """Hang new pages below `node`: by lengthening its edge where this lease alone holds it, else as new nodes."""
        count = len(run) // ID_BYTES
        if not here:
            self.num_below += count
            return self._hang(node, lease, data, run, Tier.HOST)
        self.num_pages += count
        if (
            node is not lease.node
            or node.children
            or node.ghosts
            or node.held > 1
            or node.parent is None
            or len(node.key) > _LONGEST_GROWN
        ):
            node.ticket = 0
            return self._hang(node, lease, data, run, Tier.DEVICE)
        self.names.appended(node, node, data, run, Tier.DEVICE)
        node.key += data
        node.run += run
        node.tail = b""
        self._levels.num_held[1] += count
        return node

    def _hang(self, node: Node, lease: Lease, data: bytes, run: bytes, tier: Tier) -> Node:
        """New pages below `node` as new nodes: one, or several where tokens come back, since a new edge ends where
        something else that was evicted still hangs."""
        while data:
            size, below, ghost = self.ghosts.returning(node, data)
            pages = size // self._page_bytes * ID_BYTES
            leaf = Node(node.namespace, node, data[:size], run[:pages], node.depth + node.num_pages, self._clock)
            hang(leaf, below)
            if ghost is not None:
                lease.turn = max(lease.turn, ghost.turn + 1)
            leaf.turn, leaf.last_used = lease.turn, self._clock
            self.names.appended(leaf, node, leaf.key, leaf.run, tier)
            node.children[leaf.key[: self._page_bytes]] = leaf
            self._policy.stored(leaf, ghost.memo if ghost is not None else None)
            node, data, run = leaf, data[size:], run[pages:]
        return node

    def _eviction(self, cause: str) -> Eviction:
        return Eviction(cause, self._clock, self._seconds())

    def _forget(self, node: Node, keep: int, eviction: Eviction, removed: list[bytes]) -> None:
        """Forget all but the first `keep` pages of an unleased node, and all below it; their ids go to `removed`."""
        if node.children:
            removed += [self._cut(found, 0, eviction) for found in reversed(nodes_below(node))]
        removed.append(self._cut(node, keep, eviction))

    def _cut(self, node: Node, keep: int, eviction: Eviction) -> bytes:
        """Keep an unleased leaf's first `keep` pages; with none, take it out of the tree. Returns the other ids."""
        parent = node.parent
        assert parent is not None
        self.version += 1
        self._tell_gone(node, keep)
        if self._has_lower and not self.is_here(node):
            self.num_below -= node.num_pages - keep
        else:
            self.num_pages -= node.num_pages - keep
        run = node.run[keep * ID_BYTES :]
        node.run = node.run[: keep * ID_BYTES]
        if keep:
            self._cut_key(node, keep * self._page_bytes, eviction)
            self.offer(node)
            return run
        del parent.children[node.key[: self._page_bytes]]
        node.ticket = 0
        if self.ghosts.capacity:
            node.eviction = eviction
            self.ghosts.leave(node, parent)
        self._policy.merged(node, parent)
        parent.hits += node.hits
        parent.last_used = max(parent.last_used, node.last_used)
        parent.priority = max(parent.priority, node.priority)
        self.offer(parent)
        return run

    def _cut_key(self, node: Node, at: int, eviction: Eviction) -> None:
        """What an edge loses behind its first `at` bytes is a ghost at its end now."""
        if self.ghosts.capacity:
            ghost = Node(node.namespace, node, node.key[at:], b"", 0, node.created)
            ghost.turn, ghost.memo, ghost.tail, ghost.eviction = node.turn, node.memo, node.tail, eviction
            hang(ghost, node.ghosts)
            node.ghosts = {}
            self.ghosts.leave(ghost, node)
        node.tail = b""
        node.key = node.key[:at]

    def _forget_unheld(self, root: Node) -> Ids:
        """Forget what no lease holds below a root, and its ghosts; the root goes too where nothing is left."""
        removed: list[bytes] = []
        eviction = self._eviction("")
        held = [root]
        for node in held:  # grows while it is walked
            for child in list(node.children.values()):
                if child.level:
                    held.append(child)
                else:
                    self._forget(child, 0, eviction, removed)
        self.ghosts.forget_below(held)
        self.offer(root)
        return join_ids(removed)

    def offer(self, node: Node) -> None:
        """Queue a node for eviction if it is now an unleased leaf; drop a root that nothing needs."""
        if node.level:
            return
        if node.parent is None:
            self._drop_root(node)
        elif self._has_lower:
            self._where.offer(node)
        elif not node.children:
            self._policy.offered(node)

    def _drop_root(self, node: Node) -> None:
        """Drop a node if it is a root that nothing needs."""
        if node.parent is not None or node.level or node.children or node.ghosts:
            return
        if self.roots.get(node.namespace) is node:
            del self.roots[node.namespace]
        elif node in self.hidden_roots:
            self.hidden_roots.remove(node)

    def _arrive(self, node: Node) -> None:
        """A node that a lease holds comes to the device. Its parent is there."""
        parent = node.parent
        assert parent is not None
        first = node.key[: self._page_bytes]
        parent.children[first] = parent.children.pop(first)
        parent.ticket = 0
        count = node.num_pages
        self.num_pages += count
        self.num_below -= count
        self._levels.arrived(node)
        self.names.stored(node, 0, count, Tier.DEVICE)

    def _leave(self, node: Node, leave: Give) -> None:
        """An unleased node's pages, which all have copies, leave the device. It has no child there."""
        parent = node.parent
        assert parent is not None
        self.version += 1
        node.ticket = 0
        self.num_pages -= node.num_pages
        self.num_below += node.num_pages
        self.names.removed(node, 0, node.num_pages, Tier.DEVICE)
        leave(node.pages)
        self._policy.merged(node, parent)
        parent.last_used = max(parent.last_used, node.last_used)
        parent.priority = max(parent.priority, node.priority)
        self.offer(parent)
        self.offer(node)

    def _tell_gone(self, node: Node, keep: int) -> None:
        """All but the first `keep` pages of a node are not found any more, wherever they are."""
        if self.names.has_listener:
            if self.is_here(node):
                self.names.removed(node, keep, node.num_pages, Tier.DEVICE)
            self.names.removed(node, keep, self.num_copies(node), Tier.HOST)
            node.hashes = cut_hashes(node.hashes, keep)[0]


def _stays(pages: Ids) -> None:
    raise AssertionError("pages that should be forgotten stay in the tree")
