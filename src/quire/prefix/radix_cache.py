"""RadixCache: which prefixes are cached, in which pages, and which may go. It decides; the cache executes.

One tree per namespace. An edge is a run of whole pages: its tokens as raw int32 bytes, compared as memory, and their
page ids. Children are found by the bytes of their first page. The tree never frees a page: `insert` and `evict` return
the ids that nobody holds any more, and the caller gives them back.

    root --[page page page]--> node --[page page]--> node (leaf)
                                \\--[page]----------> node (leaf)

A leased node and everything above it stays. The rest can be evicted leaf by leaf, so `num_evictable` counts it all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from quire.errors import LeaseError
from quire.prefix.hashing import chain_pages, namespace_seed
from quire.prefix.leaves import EvictionPolicy
from quire.prefix.node import Ghost, Lease, Node
from quire.spec.events import AllCleared, CacheEvent, Namespace, PagesRemoved, PagesStored
from quire.spec.ids import Ids

TOKEN_BYTES = 4
GHOSTS = 16_384  # evicted edges remembered: what comes back later than that many evictions teaches nothing
_NO_PAGES: Ids = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """How far a prefix is cached. A snapshot: valid until the tree changes; `RadixCache.lease` makes it last.

    `pages` are the page ids of the matched pages, in order. `path` holds the nodes they come from, the last one
    possibly matched in part.
    """

    namespace: Namespace
    pages: Ids
    path: tuple[Node, ...]
    version: int

    @property
    def num_pages(self) -> int:
        """Matched pages."""
        return len(self.pages)


@dataclass(frozen=True, slots=True)
class Insertion:
    """What `RadixCache.insert` did: the pages that now stand for the inserted tokens, and the caller's pages that were
    not taken because those tokens were cached already (the caller still owns these)."""

    pages: Ids
    duplicates: Ids


class RadixCache:
    """One radix tree for every kind of memory: it holds page ids, and where their bytes are is not its business.

    `emit` receives an event for every page that becomes or stops being reusable; without it no page is ever hashed.
    `identity` is what hashes begin with, so that caches of different models or layouts never name their pages alike.
    """

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy,
        *,
        emit: Callable[[CacheEvent], None] | None = None,
        identity: bytes = b"",
    ) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._policy = policy
        self._emit = emit
        self._identity = identity
        self._roots: dict[Namespace, Node] = {}
        self._clock = 0
        self._ghosts: deque[tuple[Node, bytes]] = deque()
        self.version = 0  # changes whenever a `Match` taken before may no longer be followed
        self.num_pages = 0
        self.num_protected = 0  # pages that at least one lease holds
        self.num_shared = 0  # pages that at least two hold

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could return: all that no lease holds."""
        return self.num_pages - self.num_protected

    # -- finding

    def match(self, namespace: Namespace, tokens: Ids) -> Match:
        """The longest cached prefix of `tokens` in whole pages. Changes nothing. O(edges + bytes compared)."""
        node = self._roots.get(namespace)
        if node is None:
            return Match(namespace, _NO_PAGES, (), self.version)
        data = tokens.tobytes()
        pages: list[Ids] = []
        path: list[Node] = []
        for child, matched in self._walk(node, data):
            path.append(child)
            pages.append(child.pages[:matched])
        return Match(namespace, np.concatenate(pages) if pages else _NO_PAGES, tuple(path), self.version)

    def lease(self, match: Match, num_pages: int | None = None, *, priority: int = 0) -> Lease:
        """Pin the first `num_pages` pages of a match (all of them by default) and count a hit on them.

        Splits an edge where the pinned part ends inside it. Raises LeaseError if edges were cut since the match.
        """
        if match.version != self.version:
            raise LeaseError("a match was leased after the tree had changed; match again.")
        wanted = match.num_pages if num_pages is None else num_pages
        assert wanted <= match.num_pages
        node = self._root(match.namespace)
        depth = 0
        for child in match.path:
            if depth >= wanted:
                break
            take = min(len(child.pages), wanted - depth)
            node = child if take == len(child.pages) else self._split(child, take)
            depth += take
        self._clock += 1
        self._pin(node, None)
        for ancestor in self._upward(node):
            ancestor.last_used = self._clock
            ancestor.hits += 1
            ancestor.priority = max(ancestor.priority, priority)
        self._policy.used(node)
        return Lease(node, depth, priority)

    def release(self, lease: Lease) -> None:
        """Give a lease back. What it alone held becomes evictable. Raises LeaseError the second time."""
        node = lease.close()
        self._clock += 1
        for ancestor in self._upward(node):
            ancestor.last_used = self._clock
            ancestor.leases -= 1
            assert ancestor.leases >= 0
            if ancestor.leases == 0:
                self.num_protected -= len(ancestor.pages)
            elif ancestor.leases == 1:
                self.num_shared -= len(ancestor.pages)
        self._offer(node)

    # -- growing

    def insert(self, lease: Lease, tokens: Ids, pages: Ids) -> Insertion:
        """Cache `tokens` (whole pages) after the leased path, and move the lease to their end.

        The tree takes over the caller's `pages` for what was not cached yet:

            leased path | tokens cached meanwhile by another | new tokens
                        | tree's pages stand; caller's are   | caller's pages
                        | `duplicates`                       | become the tree's
        """
        data = tokens.tobytes()
        assert len(data) == len(pages) * self._page_bytes
        start = node = lease.node
        self._clock += 1
        matched_pages: list[Ids] = []
        depth = 0
        for child, matched in self._walk(node, data):
            matched_pages.append(child.pages[:matched])
            node = child if matched == len(child.pages) else self._split(child, matched)
            depth += matched
        if depth:
            self._policy.used(node)
        fresh = pages[depth:]
        if len(fresh):
            node = self._append(node, lease, data[depth * self._page_bytes :], fresh)
        self._pin(node, start)
        for ancestor in self._upward(node):
            if ancestor is start:
                break
            ancestor.last_used = self._clock
            ancestor.priority = max(ancestor.priority, lease.priority)
        lease.move_to(node, lease.num_pages + len(pages))
        if not depth:
            return Insertion(pages, _NO_PAGES)
        return Insertion(np.concatenate((*matched_pages, fresh)), pages[:depth])

    # -- shrinking

    def evict(self, num_pages: int) -> Ids:
        """Forget up to `num_pages` pages that no lease holds, in the policy's order, and return them.

        A leaf loses its tail first, and only as much of it as is needed. O(evicted), plus a log per leaf.
        """
        victims: list[Ids] = []
        left = num_pages
        while left > 0 and (node := self._policy.victim()) is not None:
            taken = min(left, len(node.pages))
            keep = len(node.pages) - taken
            victims.append(node.pages[keep:])
            self._emit_removed(node, keep)
            left -= taken
            self.num_pages -= taken
            self._cut(node, keep)
        return np.concatenate(victims) if victims else _NO_PAGES

    def clear(self) -> Ids:
        """Forget everything that no lease holds and return its pages."""
        pages = self.evict(self.num_pages)
        if not self.num_pages and self._emit is not None:
            self._emit(AllCleared())
        return pages

    # -- looking, for audits and statistics

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def roots(self) -> dict[Namespace, Node]:
        """The root of each namespace that has or had pages held."""
        return dict(self._roots)

    def queued(self) -> set[Node]:
        """Nodes that the policy could evict. O(its queues)."""
        return set(self._policy.candidates())

    def path_pages(self, lease: Lease) -> Ids:
        """Page ids of the leased path, in order."""
        parts = [node.pages for node in self._upward(lease.node)]
        return np.concatenate(parts[::-1]) if parts else _NO_PAGES

    # -- inside

    def _walk(self, node: Node, data: bytes) -> Iterator[tuple[Node, int]]:
        """Edges that `data` follows below `node`, each with how many of its pages match, up to the first difference."""
        page_bytes = self._page_bytes
        end = len(data) - len(data) % page_bytes
        at = 0
        while at < end:
            child = node.children.get(data[at : at + page_bytes])
            if child is None:
                return
            length = min(len(child.key), end - at)
            common = _common_prefix(data, at, child.key, length, page_bytes)
            whole = common == len(child.key)  # before the caller may split the edge
            yield child, common // page_bytes
            if not whole:
                return
            node = child
            at += common

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, b"", _NO_PAGES, self._clock)
            root.hashes = (namespace_seed(namespace, self._identity),) if self._emit is not None else ()
        return root

    def _upward(self, node: Node) -> Iterator[Node]:
        """The node and its ancestors, the root last."""
        current: Node | None = node
        while current is not None:
            yield current
            current = current.parent

    def _pin(self, node: Node, held: Node | None) -> None:
        """Count one lease on the path from `node` up to, and not including, `held`, which it already counts on."""
        for ancestor in self._upward(node):
            if ancestor is held:
                return
            if ancestor.leases == 0:
                self.num_protected += len(ancestor.pages)
            elif ancestor.leases == 1:
                self.num_shared += len(ancestor.pages)
            ancestor.leases += 1

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after its first `at` pages and return the new upper part. The lower part keeps its identity, so
        leases on it stay right; the upper part is pinned by the same leases, since they count on every ancestor."""
        assert 0 < at < len(node.pages) and node.parent is not None
        self.version += 1
        cut = at * self._page_bytes
        upper = Node(node.namespace, node.parent, node.key[:cut], node.pages[:at], node.created)
        upper.leases = node.leases
        upper.hits = node.hits
        upper.last_used = node.last_used
        upper.priority = node.priority
        upper.answer = node.answer
        upper.memo = node.memo
        upper.hashes = node.hashes[:at]
        node.parent.children[self._first_page(upper)] = upper
        node.parent = upper
        node.key = node.key[cut:]
        node.pages = node.pages[at:]
        node.hashes = node.hashes[at:]
        upper.children[self._first_page(node)] = node
        return upper

    def _append(self, node: Node, lease: Lease, data: bytes, pages: Ids) -> Node:
        """Hang new pages below `node`: by lengthening its edge where this lease alone holds it, else as a new leaf."""
        parent_hash = node.hashes[-1] if node.hashes else b""
        hashes = chain_pages(parent_hash, data, self._page_bytes) if self._emit is not None else ()
        self.num_pages += len(pages)
        if node is lease.node and node.is_leaf and not node.is_root and node.leases == 1:
            node.key += data
            node.pages = np.concatenate((node.pages, pages))
            node.hashes += hashes
            self.num_protected += len(pages)
            leaf = node
        else:
            leaf = Node(node.namespace, node, data, pages.copy(), self._clock)
            leaf.hashes = hashes
            first = self._first_page(leaf)
            node.children[first] = leaf
            ghost = node.ghosts.pop(first, None)
            if ghost is not None:
                leaf.turn = max(leaf.turn, ghost.turn + 1)
            self._policy.stored(leaf, ghost.memo if ghost is not None else None)
        if self._emit is not None:
            self._emit(PagesStored(namespace=leaf.namespace, parent=parent_hash, hashes=hashes, tokens=data))
        return leaf

    def _cut(self, node: Node, keep: int) -> None:
        """Keep an unleased leaf's first `keep` pages; with none, take it out of the tree."""
        parent = node.parent
        assert parent is not None
        self.version += 1
        self._leave_ghost(node, keep, node if keep else parent)
        if keep:
            node.key = node.key[: keep * self._page_bytes]
            node.pages = node.pages[:keep]
            node.hashes = node.hashes[:keep]
            self._offer(node)
            return
        del parent.children[self._first_page(node)]
        node.ticket = 0
        self._policy.merged(node, parent)
        self._offer(parent)

    def _leave_ghost(self, node: Node, keep: int, at: Node) -> None:
        """Remember at `at` what is evicted of a leaf. It stands for the leaf's own ghosts too."""
        turn = max((ghost.turn for ghost in node.ghosts.values()), default=node.turn)
        node.ghosts.clear()
        first = node.key[keep * self._page_bytes : (keep + 1) * self._page_bytes]
        at.ghosts[first] = Ghost(node.memo, turn)
        self._ghosts.append((at, first))
        if len(self._ghosts) > GHOSTS:
            oldest, page = self._ghosts.popleft()
            oldest.ghosts.pop(page, None)

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it is now an unleased leaf; drop a root that nothing needs."""
        if node.leases or node.children:
            return
        if node.is_root:
            self._roots.pop(node.namespace, None)
            return
        self._policy.offered(node)

    def _emit_removed(self, node: Node, keep: int) -> None:
        if self._emit is not None:
            self._emit(PagesRemoved(namespace=node.namespace, hashes=node.hashes[keep:]))

    def _first_page(self, node: Node) -> bytes:
        return node.key[: self._page_bytes]


def _common_prefix(data: bytes, at: int, key: bytes, length: int, unit: int) -> int:
    """How many of the first `length` bytes of `key` equal `data[at:]`, in whole units; the first unit is known to."""
    if data[at : at + length] == (key if length == len(key) else key[:length]):
        return length
    left = np.frombuffer(data, dtype=np.int32, count=length // TOKEN_BYTES, offset=at)
    right = np.frombuffer(key, dtype=np.int32, count=length // TOKEN_BYTES)
    different = int((left != right).argmax()) * TOKEN_BYTES
    return different - different % unit
