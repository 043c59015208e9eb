"""RadixCache: which prefixes are cached, in which pages, and which may go. It decides; the cache executes.

One tree per namespace. An edge is a run of whole pages: its tokens as raw int32 bytes, compared as memory, and their
page ids. Children are found by the bytes of their first page. The tree never frees a page: `insert` and `evict` return
the ids that nobody holds any more, and the caller gives them back.

    root --[page page page]--> node --[page page]--> node (leaf)
                                \\--[page]----------> node (leaf)

A leased node and everything above it stays. The rest can be evicted leaf by leaf, so `num_evictable` counts it all.
What matching costs is one lookup and one comparison of memory for each edge; nothing is done for each page or token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from quire.errors import LeaseError
from quire.prefix.ghosts import Eviction, Ghost, Ghosts, Holder
from quire.prefix.hashing import PageHashes, cut_hashes, namespace_seed
from quire.prefix.leaves import EvictionPolicy
from quire.prefix.lower_order import LowerOrder
from quire.prefix.match import Insertion, Match
from quire.prefix.node import ID_BYTES, Lease, Node
from quire.prefix.parting import TOKEN_BYTES, Parting, common_pages, find_parting
from quire.spec.events import AllCleared, CacheEvent, Namespace, PagesRemoved, PagesStored
from quire.spec.ids import Ids, Tier

_NO_PAGES: Ids = np.empty(0, dtype=np.int32)
_LONGEST_GROWN = 1 << 16  # bytes: a longer edge is not lengthened, because that copies it
_MOST_NAMESPACES = 8  # others that are looked at to explain a miss
_LONG = 1 << 13  # tokens: more are worth a look at the first edge before they are copied


class RadixCache:
    """One radix tree for every kind of memory: it holds page ids, and where their bytes are is not its business.

    `emit` receives an event for every page that becomes or stops being reusable; without it no page is ever hashed.
    `identity` is what hashes begin with, so that caches of different models or layouts never name their pages alike.
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
    ) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._policy = policy
        self._emit = emit
        self._identity = identity
        self._seconds = seconds
        self._roots: dict[Namespace, Node] = {}
        self._beginnings: dict[bytes, dict[Node, None]] = {}  # which roots have a child with that first page
        self.orphans: list[Node] = []  # roots that nobody finds any more, while something below is held
        self.ghosts = Ghosts(remembered * TOKEN_BYTES, self._page_bytes, self._forgotten)
        self._clock = 0
        self.version = 0  # changes whenever a `Match` taken before may no longer be followed
        self._lower = LowerOrder()
        self._has_copies = False  # whether a page ever had one below the device
        self.num_pages = 0  # on the device
        self.num_protected = 0  # of these, pages that at least one lease holds
        self.num_shared = 0  # of these, pages that at least two hold
        self.num_below = 0  # pages that have a copy below only

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could take off the device: all there that no lease holds."""
        return self.num_pages - self.num_protected

    # -- finding

    def match(self, namespace: Namespace, tokens: Ids) -> Match:
        """The longest cached prefix of `tokens` in whole pages. Changes nothing. O(edges + bytes compared)."""
        node = self._roots.get(namespace)
        path: list[Node] = []
        if node is None:
            return Match(namespace, _NO_PAGES, path, self.version)
        page_bytes = self._page_bytes
        end = len(tokens) * TOKEN_BYTES // page_bytes * page_bytes
        at = 0
        if len(tokens) > _LONG:
            first = node.children.get(tokens[: self.page_size].tobytes())
            if first is None:
                return Match(namespace, _NO_PAGES, path, self.version)
            if 2 * len(first.key) > end and _begins_with(tokens, first.key):
                path.append(first)
                node, at = first, len(first.key)
                if end - at < page_bytes:
                    return Match(namespace, first.pages, path, self.version)
        if at:
            tokens = tokens[at // TOKEN_BYTES :]
            at, end = 0, end - at
        data = tokens.tobytes()
        children, part = node.children, b""
        while at < end:
            try:
                child = children[data[at : at + page_bytes]]
            except KeyError:
                break
            key = child.key
            if not data.startswith(key, at):
                part = child.run[: common_pages(data, at, key, page_bytes) // page_bytes * ID_BYTES]
                break
            path.append(child)
            at += len(key)
            children = child.children
        runs = [node.run for node in path]
        if part:
            runs.append(part)
            path.append(child)
        return Match(namespace, np.frombuffer(b"".join(runs), dtype=np.int32), path, self.version)

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
        self._hold(node)
        return Lease(node, wanted, priority)

    def release(self, lease: Lease) -> None:
        """Give a lease back. What it alone held becomes evictable. Raises LeaseError the second time."""
        node = lease.close()
        self._clock += 1
        node.last_used = self._clock
        self._let_go(node)
        self._offer(node)

    def parting(self, namespace: Namespace, tokens: Ids) -> Parting:
        """Where `tokens` leave what is cached, and what is known of what would have come next. Changes nothing."""
        first = tokens[: self.page_size].tobytes()
        others = (root for root in self._beginnings.get(first, ()) if root.namespace != namespace)
        return find_parting(self._roots.get(namespace), tokens, self.page_size, islice(others, _MOST_NAMESPACES))

    # -- growing

    def insert(self, lease: Lease, tokens: Ids, pages: Ids) -> Insertion:
        """Cache `tokens` (whole pages) after the leased path, and move the lease to their end.

        Pages on its way that had a copy below only are on the device from now on: the caller sees to their bytes. The
        tree takes over the caller's `pages` for what was not cached yet:

            leased path | tokens cached meanwhile by another | new tokens
                        | tree's pages stand; caller's are   | caller's pages
                        | `duplicates`                       | become the tree's
        """
        data = tokens.tobytes()
        page_bytes, end = self._page_bytes, len(data)
        assert end == len(pages) * page_bytes
        start = lease.node
        self._clock += 1
        node, runs, at = self._follow(start, data)
        if at and not node.here:
            self._arrive_above(node)
        depth = at // page_bytes
        if depth:
            self._policy.used(node)
        if at < end:
            fresh = pages[depth:].tobytes()
            runs.append(fresh)
            node = self._append(node, lease, data[at:], fresh)
        if node is not start:
            self._hold(node)
            self._let_go(start)
        node.last_used = self._clock
        node.priority = max(node.priority, lease.priority)
        lease.move_to(node, lease.num_pages + len(pages))
        if not depth:
            return Insertion(pages, _NO_PAGES)
        return Insertion(np.frombuffer(b"".join(runs), dtype=np.int32), pages[:depth])

    def _follow(self, node: Node, data: bytes) -> tuple[Node, list[bytes], int]:
        """How far `data` is cached below `node`: the node at the end, the page ids in runs, and the bytes. An edge in
        which they part is split there."""
        page_bytes, end, at = self._page_bytes, len(data), 0
        runs: list[bytes] = []
        while at < end:
            child = node.children.get(data[at : at + page_bytes])
            if child is None:
                break
            if data.startswith(child.key, at):
                node = child
            else:
                node = self._split(child, common_pages(data, at, child.key, page_bytes) // page_bytes)
            runs.append(node.run)
            at += len(node.key)
        return node, runs, at

    def ended(self, lease: Lease, tail: Ids, num_generated: int) -> None:
        """The lease's request is over: behind its path it had `tail`, less than a page, and it had generated so many
        tokens in all. For those who ask later why no more is cached, and for the policy."""
        node = lease.node
        node.answer = max(0, num_generated)
        if self.ghosts.capacity:
            node.tail = tail.tobytes()

    # -- shrinking

    def evict(self, num_pages: int, cause: str = "") -> Ids:
        """Forget up to `num_pages` pages that no lease holds, in the policy's order, and return them.

        A leaf loses its tail first, and only as much of it as is needed. O(leaves evicted), and what the policy takes
        to choose them. `cause` says for whom, to those who ask later.
        """
        runs: list[bytes] = []
        left = num_pages
        eviction = Eviction(cause, self._clock, self._seconds())
        while left > 0 and (node := self._policy.victim()) is not None:
            taken = min(left, node.num_pages)
            runs.append(self._cut(node, node.num_pages - taken, eviction))
            left -= taken
        self.num_pages -= num_pages - left
        return join_ids(runs)

    def clear(self) -> Ids:
        """Forget everything that no lease holds and return its pages; forget what was evicted."""
        pages = self._evict_all()
        self.ghosts.clear()
        if not self.num_pages and not self.num_below and self._emit is not None:
            self._emit(AllCleared())
        return pages

    def rename(self, identity: bytes) -> None:
        """What is cached from now on is of another model. Everything that was cached has been flushed."""
        assert not self._roots
        self._identity = identity

    # -- looking, for audits and statistics

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = [child for root in self.tops() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def roots(self) -> dict[Namespace, Node]:
        """The root of each namespace that has or had pages held."""
        return dict(self._roots)

    def tops(self) -> list[Node]:
        """Every root, those among them that nobody finds any more."""
        return [*self._roots.values(), *self.orphans]

    def root(self, namespace: Namespace) -> Node | None:
        """The root of that namespace, if it has one."""
        return self._roots.get(namespace)

    def queued(self) -> set[Node]:
        """Nodes that the policy could evict. O(its queues)."""
        return set(self._policy.candidates())

    def path_pages(self, lease: Lease) -> Ids:
        """Page ids of the leased path, in order."""
        runs = []
        node: Node | None = lease.node
        while node is not None:
            runs.append(node.run)
            node = node.parent
        return np.frombuffer(b"".join(runs[::-1]), dtype=np.int32)

    # -- inside

    def _evict_all(self) -> Ids:
        return self.evict(self.num_pages)

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, b"", b"", 0, self._clock)
        return root

    def _end_of(self, match: Match, num_pages: int) -> Node:
        """The node at the end of a match's first `num_pages` pages. Raises LeaseError if edges were cut since."""
        if match.version != self.version:
            raise LeaseError("a match was leased after the tree had changed; match again.")
        assert num_pages <= match.num_pages
        if not num_pages:
            return self._root(match.namespace)
        node = next(node for node in reversed(match.path) if node.depth < num_pages)
        if num_pages - node.depth < node.num_pages:
            return self._split(node, num_pages - node.depth)
        return node

    def _hold(self, node: Node) -> None:
        """Count one lease more at `node`, and on the way up what that changes."""
        node.leases += 1
        holder: Node | None = node
        while holder is not None:
            holder.held += 1
            if holder.level == 2:
                return
            holder.level += 1
            if not holder.here:
                pass
            elif holder.level == 1:
                self.num_protected += holder.num_pages
            else:
                self.num_shared += holder.num_pages
            holder = holder.parent

    def _let_go(self, node: Node) -> None:
        """Count one lease less at `node`, and on the way up what that changes."""
        node.leases -= 1
        assert node.leases >= 0
        holder: Node | None = node
        while holder is not None:
            holder.held -= 1
            if holder.held >= 2:
                return
            holder.level -= 1
            if not holder.here:
                pass
            elif holder.level == 0:
                self.num_protected -= holder.num_pages
            else:
                self.num_shared -= holder.num_pages
            holder = holder.parent

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after its first `at` pages and return the new upper part. The lower part keeps its identity, so
        leases on it stay right; the upper part has its level, since whoever holds the lower part holds the upper."""
        assert 0 < at < node.num_pages and node.parent is not None
        self.version += 1
        parent, cut = node.parent, at * self._page_bytes
        upper = Node(node.namespace, parent, node.key[:cut], node.run[: at * ID_BYTES], node.depth, node.created)
        upper.answer, upper.memo = node.answer, node.memo
        upper.held = upper.level = node.level
        upper.here, upper.num_here = node.here, int(node.here)
        upper.kept, node.kept = min(node.kept, at), max(0, node.kept - at)
        upper.num_kept = int(node.kept > 0)
        upper.hits, upper.last_used, upper.priority = node.hits, node.last_used, node.priority
        upper.hashes, node.hashes = cut_hashes(node.hashes, at)
        parent.children[self._first_page(upper)] = upper
        node.parent = upper
        node.key = node.key[cut:]
        node.run = node.run[at * ID_BYTES :]
        node.depth += at
        upper.children[self._first_page(node)] = node
        if upper.kept and not upper.num_kept:
            self._offer_lower(upper)
        return upper

    def _append(self, node: Node, lease: Lease, data: bytes, run: bytes) -> Node:
        """Hang new pages below `node`: by lengthening its edge where this lease alone holds it, else as new nodes. One,
        or several where tokens come back: a new edge ends where something else that was evicted still hangs."""
        self.num_pages += len(run) // ID_BYTES
        if (
            node is lease.node
            and not node.children
            and not node.ghosts
            and node.held == 1
            and node.parent is not None
            and len(node.key) <= _LONGEST_GROWN
        ):
            if self._emit is not None:
                node.hashes.append(self._stored(node, data))
            node.key += data
            node.run += run
            node.tail = b""
            self.num_protected += len(run) // ID_BYTES
            return node
        return self._hang(node, lease, data, run)

    def _hang(self, node: Node, lease: Lease, data: bytes, run: bytes, *, here: bool = True) -> Node:
        """Hang new pages below `node` as new nodes; those that are not `here` have copies below the device."""
        while data:
            size, below, ghost = self._returning(node, data)
            pages = size // self._page_bytes * ID_BYTES
            leaf = Node(node.namespace, node, data[:size], run[:pages], node.depth + node.num_pages, self._clock)
            leaf.here = here
            node.num_here += here
            if below:
                self.ghosts.hang(leaf, below)
            if ghost is not None:
                lease.turn = max(lease.turn, ghost.turn + 1)
            leaf.turn = lease.turn
            if self._emit is not None:
                leaf.hashes = [self._stored(node, leaf.key, Tier.DEVICE if here else Tier.HOST)]
            if not here:
                self.num_below += leaf.num_pages
                self._copied(leaf, leaf.num_pages, told=True)
            first = self._first_page(leaf)
            node.children[first] = leaf
            if node.parent is None:
                self._beginnings.setdefault(first, {})[node] = None
            self._policy.stored(leaf, ghost.memo if ghost is not None else None)
            node, data, run = leaf, data[size:], run[pages:]
        return node

    def _returning(self, node: Node, data: bytes) -> tuple[int, dict[bytes, Ghost], Ghost | None]:
        """How much of `data` goes below `node` as one edge, the ghosts that hang at its end, and the deepest of those
        that its tokens bring back, which is no ghost any more."""
        holder: Holder = node
        last: Ghost | None = None
        below: dict[bytes, Ghost] = {}
        size = 0
        while size < len(data):
            ghost = holder.ghosts.get(data[size : size + self._page_bytes])
            if ghost is None:
                return (size if below else len(data)), below, last
            if size and len(below) > 1:
                break
            last = ghost
            common = common_pages(data, size, ghost.key, self._page_bytes)
            whole = common == len(ghost.key)
            below = self.ghosts.take(ghost, common)
            size += common
            holder = ghost
            if not whole:
                break
        return size, below, last

    def _cut(self, node: Node, keep: int, eviction: Eviction) -> bytes:
        """Keep an unleased leaf's first `keep` pages; with none, take it out of the tree. Returns the other ids."""
        parent = node.parent
        assert parent is not None
        self.version += 1
        if self._emit is not None:
            if node.here:
                self._tell_removed(node, keep, node.num_pages, Tier.DEVICE)
            self._tell_removed(node, keep, node.kept, Tier.HOST)
            node.hashes = cut_hashes(node.hashes, keep)[0]
        if node.kept > keep:
            self._copied(node, keep, told=True)
        cut = keep * self._page_bytes
        below, node.ghosts = node.ghosts, {}
        ghost = Ghost(node if keep else parent, node.key[cut:], eviction, node.turn, node.memo, node.tail)
        self.ghosts.leave(ghost, below)
        node.tail = b""
        run = node.run[keep * ID_BYTES :]
        if keep:
            node.key = node.key[:cut]
            node.run = node.run[: keep * ID_BYTES]
            self._offer(node)
            return run
        first = self._first_page(node)
        del parent.children[first]
        parent.num_here -= node.here
        if parent.parent is None:
            self._begins_no_more(first, parent)
        node.ticket = node.lower_ticket = 0
        self._policy.merged(node, parent)
        parent.hits += node.hits
        parent.last_used = max(parent.last_used, node.last_used)
        parent.priority = max(parent.priority, node.priority)
        node.run = b""
        self._offer(parent)
        return run

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it is now an unleased leaf; drop a root that nothing needs."""
        if node.level:
            return
        if node.parent is None:
            if not node.children and not node.ghosts:
                self._drop_root(node)
            return
        if node.here and not node.num_here:
            self._policy.offered(node)
        if self._has_copies:
            self._offer_lower(node)

    def _drop_root(self, root: Node) -> None:
        if self._roots.get(root.namespace) is root:
            del self._roots[root.namespace]
        elif root in self.orphans:
            self.orphans.remove(root)

    def _begins_no_more(self, first: bytes, root: Node) -> None:
        """A root has no child with that first page that anybody finds."""
        roots = self._beginnings.get(first, {})
        roots.pop(root, None)
        if not roots:
            self._beginnings.pop(first, None)

    def _offer_lower(self, node: Node) -> None:
        """Queue what can go from a path with copies below, where there are tiers."""

    def _arrive_above(self, node: Node) -> None:
        """A node and all above it are on the device from now on."""
        coming = []
        above: Node | None = node
        while above is not None and not above.here:
            coming.append(above)
            above = above.parent
        for found in reversed(coming):
            self._arrive(found)

    def _arrive(self, node: Node) -> None:
        """A node whose parent is on the device is there too."""
        parent = node.parent
        assert parent is not None and parent.here and not node.here
        node.here = True
        parent.num_here += 1
        count = node.num_pages
        self.num_pages += count
        self.num_below -= count
        self.num_protected += count if node.level else 0
        self.num_shared += count if node.level > 1 else 0
        if self._emit is not None:
            for hashes in node.hashes:
                self._emit(PagesStored(node.namespace, hashes, Tier.DEVICE))
        self._offer(node)

    def _copied(self, node: Node, kept: int, *, told: bool = False) -> None:
        """The first `kept` pages of a node have copies below."""
        had, node.kept = node.kept, kept
        self._has_copies = True
        parent = node.parent
        assert parent is not None
        if self._emit is not None and not told:
            if kept > had:
                for hashes in cut_hashes(cut_hashes(node.hashes, kept)[0], had)[1]:
                    self._emit(PagesStored(node.namespace, hashes, Tier.HOST))
            else:
                self._tell_removed(node, kept, had, Tier.HOST)
        parent.num_kept += (kept > 0) - (had > 0)
        if kept:
            self._offer_lower(node)
        elif had:
            self._offer_lower(parent)

    def _tell_removed(self, node: Node, start: int, stop: int, tier: Tier) -> None:
        assert self._emit is not None
        if start < stop:
            for hashes in cut_hashes(cut_hashes(node.hashes, stop)[0], start)[1]:
                self._emit(PagesRemoved(node.namespace, hashes, tier))

    def _forgotten(self, holder: Holder) -> None:
        """A ghost that hung there is gone."""
        if isinstance(holder, Node) and holder.parent is None:
            self._offer(holder)

    def _stored(self, parent: Node, data: bytes, tier: Tier = Tier.DEVICE) -> PageHashes:
        """Say that pages with these tokens are cached behind `parent`; their hashes, to be computed when needed."""
        assert self._emit is not None
        above = parent.hashes[-1] if parent.hashes else namespace_seed(parent.namespace, self._identity)
        hashes = PageHashes(above, data, self._page_bytes)
        self._emit(PagesStored(parent.namespace, hashes, tier))
        return hashes

    def _first_page(self, node: Node) -> bytes:
        return node.key[: self._page_bytes]


def join_ids(runs: list[bytes]) -> Ids:
    """Page ids from runs of raw bytes."""
    return np.frombuffer(b"".join(runs), dtype=np.int32)


def _begins_with(tokens: Ids, key: bytes) -> bool:
    """Whether the tokens begin with `key`, compared where they are."""
    if not tokens.flags.c_contiguous or len(key) > tokens.nbytes:
        return False
    return key.startswith(tokens.data.cast("B")[: len(key)])
