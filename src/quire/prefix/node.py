"""Node, Lease and Levels: the parts of the tree, and which of them are held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.errors import LeaseError
from quire.prefix.hashing import PageHashes
from quire.spec.events import Namespace
from quire.spec.ids import Ids

ID_BYTES = TOKEN_BYTES = 4
_INT32 = np.dtype(np.int32)  # numpy takes 0.4 us to make it of the scalar type


@dataclass(frozen=True, slots=True)
class Eviction:
    """One call that made room: `cause` says for whom, `clock` is the tree's, `seconds` the clock's of the cache."""

    cause: str
    clock: int
    seconds: float


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One edge of the tree and the point at its end. An evicted edge is a ghost: a node without pages, which hangs
    among the `ghosts` of its parent while it is remembered (`quire.prefix.ghosts`).

    `key` is the edge's tokens as raw int32 bytes, a whole number of pages; `run` are the ids of these pages, raw too,
    so that a path is read by joining bytes. `depth` counts the pages before the edge.

    `leases` end here. `level` is min(2, leases here or below): 0 may go, 1 is protected, 2 is shared. `held` is what
    the level is made of: the leases here and the levels of the children, so that a lease changes only the nodes whose
    level it changes.

    It says nothing of where its pages' bytes are: that is looked up by their ids (`quire.prefix.placement`). All of its
    pages are on the device, or none is.

    `last_used`, `hits` and `priority` are of what ended here, and of children that are gone: right for a leaf, which is
    all that eviction asks. The clock counts the tree's operations, not seconds.
    """

    namespace: Namespace
    parent: Node | None  # only roots have none
    key: bytes
    run: bytes
    depth: int
    created: int
    last_used: int = 0
    hits: int = 0  # leases that began on a hit and ended here or in a child that is gone
    priority: int = 0  # the highest priority of a request that used it
    turn: int = 0  # requests that lengthened the path, one by one
    tail: bytes = b""  # tokens, less than a page, with which the last request to end here went on
    answer: int = 0  # tokens that the last request to end here had generated
    leases: int = 0
    held: int = 0
    level: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)  # by the bytes of the child's first page
    ghosts: dict[bytes, Node] = field(default_factory=dict)  # what was evicted from below, likewise
    hashes: list[PageHashes] = field(default_factory=list)  # of its pages, in runs as they came, while events are on
    memo: object | None = None  # the eviction policy's own
    ticket: int = 0  # of the entry in the policy's queue that counts; 0: it is no candidate for eviction
    copy_ticket: int = 0  # of the entry that counts among those whose copies below the device may go
    eviction: Eviction | None = None  # of a ghost

    @property
    def pages(self) -> Ids:
        """Page ids of the edge, in order. A view: read it, never write it."""
        return np.frombuffer(self.run, _INT32)

    @property
    def num_pages(self) -> int:
        """Pages of the edge."""
        return len(self.run) // ID_BYTES


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """A pin on a path of the tree, from the root to `node`. Released exactly once; using it afterwards is an error.

    While it lives, none of the path's pages is evicted. `num_pages` is the length of the path.
    """

    _node: Node | None
    num_pages: int
    priority: int
    turn: int  # of what its holder appends, in however many pieces
    counts: bool = True  # as a use of what it holds

    @property
    def node(self) -> Node:
        """The end of the pinned path. Raises LeaseError once released."""
        if self._node is None:
            raise LeaseError("a lease was used after it was released.")
        return self._node

    def move_to(self, node: Node, num_pages: int) -> None:
        """Extend the pin to a deeper node of the same path; the tree keeps the counts."""
        assert self._node is not None
        self._node = node
        self.num_pages = num_pages

    def close(self) -> Node:
        """Mark as released and return the node it held. Raises LeaseError the second time."""
        node = self.node
        self._node = None
        return node


class Levels:
    """Counts what leases hold. A lease changes the levels of its end and of what is above it, as far up as they do
    change.

    Of the pages on the device, at least one lease holds `num_held[1]`, and at least two hold `num_held[2]` of these.
    `is_here` says whether a node's pages are on the device; None where all are.
    """

    def __init__(self, is_here: Callable[[Node], bool] | None) -> None:
        self._is_here = is_here
        self.num_held = [0, 0, 0]

    def hold(self, end: Node) -> None:
        """One lease more ends at this node."""
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
            node = node.parent

    def let_go(self, end: Node) -> None:
        """One lease less ends at this node."""
        end.leases -= 1
        assert end.leases >= 0
        node: Node | None = end
        while node is not None:
            node.held -= 1
            if node.held >= 2:
                return
            if self._is_here is None or self._is_here(node):
                self.num_held[node.level] -= node.num_pages
            node.level -= 1
            node = node.parent

    def arrived(self, node: Node) -> None:
        """A node's pages have come to the device."""
        for level in range(1, node.level + 1):
            self.num_held[level] += node.num_pages


def nodes_below(node: Node) -> list[Node]:
    """Everything below a node, parents before children."""
    nodes = list(node.children.values())
    for found in nodes:  # grows while it is walked
        nodes += found.children.values()
    return nodes


def path_to(node: Node) -> list[Node]:
    """The nodes from this one up, without the root."""
    nodes = []
    above = node
    while above.parent is not None:
        nodes.append(above)
        above = above.parent
    return nodes


def pages_to(node: Node) -> Ids:
    """All page ids from the root down to the end of a node's edge."""
    return join_ids([above.run for above in reversed(path_to(node))])


def join_ids(runs: list[bytes]) -> Ids:
    """Page ids from runs of raw bytes."""
    return np.frombuffer(b"".join(runs), _INT32)


def common_pages(data: bytes, at: int, key: bytes, unit: int) -> int:
    """How many of the first bytes of `key` equal `data[at:]`, in whole units; the first unit is known to."""
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
