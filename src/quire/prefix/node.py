"""Node, Lease and Levels: the parts of the tree, and which of them leases hold; and EvictedEdges, tokens without pages.

They explain why a prompt is not cached any more (`quire.prefix.match`), and tell a policy which edges came back. An
evicted edge is a child of its former parent, cached or evicted. It is removed when its tokens are cached again.

    node --[page page]--> node          cached
       \\..[page page page]..> node      evicted; beyond the capacity the oldest are removed
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.errors import LeaseError
from quire.lazy_queue import LazyQueue
from quire.prefix.hashing import PageHashes
from quire.spec.events import Namespace
from quire.spec.ids import Ids

ID_BYTES = TOKEN_BYTES = 4
_INT32 = np.dtype(np.int32)  # converting the scalar type takes 0.4 us at each use


@dataclass(frozen=True, slots=True)
class Eviction:
    """One call that evicted: the request that needed room, and the time by the tree's clock and the cache's."""

    cause: str
    clock: int
    seconds: float


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class User:
    """One session, as the tree has it. `nodes` of the tree have been used by it and by no request of others, except
    of sessions that have `ended`, after which no request is expected to use what was theirs."""

    nodes: dict[Node, None] = field(default_factory=dict)  # a set in order, so that replays repeat
    ended: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One edge of the tree and the point at its end. All of its pages are on the device, or none is. An evicted edge is
    a node without pages (`quire.prefix.node`). `last_used`, `hits` and `priority` count requests that ended here or
    in an evicted child: they are complete for a leaf. Clocks count operations of the tree."""

    namespace: Namespace
    parent: Node | None  # None: a root
    key: bytes  # tokens of the edge, whole pages as raw int32 bytes
    run: bytes  # page ids of the edge, also raw: a path is read by joining bytes
    depth: int  # pages before the edge
    created: int
    last_used: int = 0
    hits: int = 0
    priority: int = 0  # the highest
    turn: int = 0  # requests that lengthened the path one after the other
    tail: bytes = b""  # tokens, less than a page, that follow the path in the last request to end here
    answer: int = 0  # tokens that the last request to end here had generated
    ending: bytes = b""  # the last of these, as a raw int32
    leases: int = 0  # that end here
    held: int = 0  # leases here, plus the levels of the children: a lease changes only nodes whose level changes
    level: int = 0  # min(2, leases here or below): 0 is evictable, 1 protected, 2 shared
    children: dict[bytes, Node] = field(default_factory=dict)  # keys: bytes of the child's first page
    evicted: dict[bytes, Node] = field(default_factory=dict)  # evicted children, likewise
    hashes: list[PageHashes] = field(default_factory=list)  # hashes of its pages, in runs as cached, if events are on
    memo: object | None = None  # belongs to the eviction policy
    ticket: int = 0  # number of its valid entry in the policy's queue; 0: no candidate for eviction
    copy_ticket: int = 0  # number of its valid entry in the queue of copies
    share: float = 1.0  # worth of a byte of it, as a part of that of its pages alone (`quire.prefix.placement.Ends`)
    user: User | None = None  # None: requests of several sessions have used it, or one without a session
    tenant: int = 0  # number of its namespace's tenant
    eviction: Eviction | None = None  # when and why an edge was evicted

    @property
    def pages(self) -> Ids:
        """Page ids of the edge, in order. A read-only view."""
        return np.frombuffer(self.run, _INT32)

    @property
    def num_pages(self) -> int:
        """The number of pages of the edge."""
        return len(self.run) // ID_BYTES

    @property
    def is_over(self) -> bool:
        """Whether only a session has used it that has ended."""
        return self.user is not None and self.user.ended

    @property
    def goes_first(self) -> bool:
        """Whether it leaves the device before others: it `is_over`, or no request can begin at its end."""
        return self.is_over or not self.share


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """A pin on the path to `node`, of `num_pages` pages, none of which is evicted before its release, exactly once."""

    end: Node | None  # None: released
    num_pages: int
    priority: int
    turn: int  # rounds of the nodes that are appended under this lease
    counts: bool = True  # whether its release updates `last_used`
    user: User | None = None  # user of the nodes that are appended

    @property
    def node(self) -> Node:
        """The node at the end of the path. Raises LeaseError after the release."""
        if self.end is None:
            raise LeaseError("a lease was used after it was released.")
        return self.end


class Levels:
    """Updates levels, and `num_held[n]`: pages on the device that at least n leases hold, and `num_unheld`: by tenant,
    pages there that none holds. No `is_here`: all are."""

    def __init__(self, is_here: Callable[[Node], bool] | None, num_tenants: int) -> None:
        self._is_here = is_here
        self.num_held = [0, 0, 0]
        self.num_unheld = array("q", bytes(8 * num_tenants))

    def hold(self, end: Node) -> None:
        """Add a lease that ends at this node."""
        end.leases += 1
        node: Node | None = end
        while node is not None:
            node.held += 1
            if node.level == 2:
                return
            node.level += 1
            node.ticket = 0
            if self._is_here is None or self._is_here(node):
                self.num_held[node.level] += node.num_pages
                if node.level == 1:
                    self.num_unheld[node.tenant] -= node.num_pages
            node = node.parent

    def release(self, end: Node) -> None:
        """Remove a lease that ends at this node."""
        end.leases -= 1
        assert end.leases >= 0
        node: Node | None = end
        while node is not None:
            node.held -= 1
            if node.held >= 2:
                return
            if self._is_here is None or self._is_here(node):
                self.num_held[node.level] -= node.num_pages
                if node.level == 1:
                    self.num_unheld[node.tenant] += node.num_pages
            node.level -= 1
            node = node.parent


def used_by(node: Node, user: User | None) -> None:
    """A request of this user uses the path to a node. Amortised O(1): above a node of its own, or of no user, are none
    of others. Requests of an ended session that still run do not count."""
    if user is not None and user.ended:
        return
    while node.parent is not None and (before := node.user) is not None and before is not user:
        before.nodes.pop(node, None)
        node.user = user if before.ended else None
        if node.user is not None:
            node.user.nodes[node] = None
        node = node.parent


def nodes_below(node: Node) -> list[Node]:
    """All nodes below this one, parents before children."""
    nodes = list(node.children.values())
    for found in nodes:  # grows while it is walked
        nodes += found.children.values()
    return nodes


def path_to(node: Node) -> list[Node]:
    """The nodes from this one up, without the root."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes


def pages_to(node: Node) -> Ids:
    """All page ids from the root to the end of a node's edge."""
    return join_ids([above.run for above in reversed(path_to(node))])


def join_ids(runs: list[bytes]) -> Ids:
    """Page ids from runs of raw int32 bytes, read-only."""
    return np.frombuffer(b"".join(runs), _INT32)


def common_pages(data: bytes, at: int, key: bytes, unit: int) -> int:
    """How many first bytes of `key` and `data[at:]` are equal, in whole units; the first unit is known to be equal."""
    if data.startswith(key, at):
        return len(key)
    length = min(len(key), (len(data) - at) // unit * unit)
    left = np.frombuffer(data, _INT32, length // TOKEN_BYTES, at)
    right = np.frombuffer(key, _INT32, length // TOKEN_BYTES)
    differs = left != right
    first = int(differs.argmax())
    if not differs[first]:
        return length
    return first * TOKEN_BYTES // unit * unit


Returned = list[tuple[Node, int]]
"""Evicted edges whose first pages are computed again, and how many pages; the deepest is the last."""


class EvictedEdges:
    """Their tokens use at most `capacity` bytes; the oldest edges are removed first. `removed` is called with the
    parent of each edge that is removed for lack of room."""

    def __init__(self, capacity: int, page_bytes: int, removed: Callable[[Node], None]) -> None:
        self.capacity = capacity
        self._page_bytes = page_bytes
        self._removed = removed
        self._order: LazyQueue[Node] = LazyQueue(lambda _, edge: edge if edge.eviction is not None else None)
        self.num_bytes = 0

    def add(self, edge: Node, parent: Node) -> None:
        """Add an edge that was a child of `parent`."""
        parent.evicted[edge.key[: self._page_bytes]] = edge
        self._order.push(0, edge)
        self.num_bytes += len(edge.key)
        while self.num_bytes > self.capacity:
            self._forget_oldest()

    def returning(self, node: Node, data: bytes) -> tuple[int, dict[bytes, Node], Returned]:
        """How many bytes of `data` become one edge below `node`, the evicted edges at its end, and the evicted edges
        that these tokens cache again, which are removed."""
        returned: Returned = []
        below: dict[bytes, Node] = {}
        size = 0
        while size < len(data):
            edge = node.evicted.get(data[size : size + self._page_bytes])
            if edge is None:
                return (size if below else len(data)), below, returned
            if size and len(below) > 1:
                break
            common = common_pages(data, size, edge.key, self._page_bytes)
            whole = common == len(edge.key)
            below = self._take(edge, common)
            returned.append((edge, common // self._page_bytes))
            size += common
            node = edge
            if not whole:
                break
        return size, below, returned

    def forget_below(self, nodes: Iterable[Node]) -> None:
        """Remove the evicted edges below these nodes, and those below them."""
        edges = [edge for node in nodes for edge in node.evicted.values()]
        for edge in edges:  # grows during the loop
            edges += self._take(edge, len(edge.key)).values()

    def clear(self) -> None:
        """Remove all edges."""
        while self.num_bytes:
            self._forget_oldest()

    def _take(self, edge: Node, num_bytes: int) -> dict[bytes, Node]:
        """Remove the first `num_bytes` of an edge; returns the edges that follow, without a parent."""
        assert edge.parent is not None and edge.eviction is not None
        del edge.parent.evicted[edge.key[: self._page_bytes]]
        self.num_bytes -= num_bytes
        if num_bytes == len(edge.key):
            edge.eviction = None
            return edge.evicted
        edge.key = edge.key[num_bytes:]
        return {edge.key[: self._page_bytes]: edge}

    def _forget_oldest(self) -> None:
        """The oldest edge has no children, because children are evicted before their parent."""
        entry = self._order.pop()
        assert entry is not None
        edge = entry.item
        below = self._take(edge, len(edge.key))
        assert edge.parent is not None and not below
        self._removed(edge.parent)


def attach(node: Node, edges: dict[bytes, Node]) -> None:
    """Make these the evicted children of a node that has none."""
    node.evicted = edges
    for edge in edges.values():
        edge.parent = node
