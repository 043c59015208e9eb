"""Node and Lease: the parts of the tree."""

from __future__ import annotations

from quire.errors import LeaseError
from quire.spec.events import Namespace
from quire.spec.ids import Ids


class Node:
    """One edge of the tree and the point at its end.

    `key` is the edge's tokens as raw int32 bytes, a whole number of pages; `pages` are their page ids. `leases` counts
    the leases at this node or below it, so a node with none has none below it either. The clock values are ticks of the
    tree's counter, not seconds.
    """

    __slots__ = (
        "answer",
        "children",
        "created",
        "ghosts",
        "hashes",
        "hits",
        "key",
        "last_used",
        "leases",
        "memo",
        "namespace",
        "pages",
        "parent",
        "priority",
        "ticket",
        "turn",
    )

    def __init__(self, namespace: Namespace, parent: Node | None, key: bytes, pages: Ids, now: int) -> None:
        self.namespace = namespace
        self.parent = parent
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = {}  # by the bytes of the child's first page
        self.ghosts: dict[bytes, Ghost] = {}  # of what was evicted below, by its first page
        self.leases = 0
        self.hits = 0  # leases that began on a hit through this node
        self.last_used = now
        self.created = now
        self.priority = 0  # the highest priority of a request that used it
        self.hashes: tuple[bytes, ...] = ()  # one per page while events are on
        self.turn: int = (
            0 if parent is None else parent.turn + 1
        )  # requests that lengthened the path one after the other
        self.answer = 0  # tokens that the last request to lengthen the edge had generated
        self.memo: object | None = None  # the eviction policy's own
        self.ticket = 0  # which entry of the policy's queue is the valid one

    @property
    def is_root(self) -> bool:
        """Roots have no edge and are never evicted while something hangs below or holds them."""
        return self.parent is None

    @property
    def is_leaf(self) -> bool:
        """No children: what eviction may take."""
        return not self.children

    def is_candidate(self, ticket: int) -> bool:
        """Whether an entry of the policy's queue is valid: the node's last one, and nobody needs the node since."""
        return ticket == self.ticket and not self.leases and not self.children


class Ghost:
    """What is left of an evicted edge: how far its path went on, in turns, and what the policy knew of it."""

    __slots__ = ("memo", "turn")

    def __init__(self, memo: object | None, turn: int) -> None:
        self.memo = memo
        self.turn = turn


class Lease:
    """A pin on a path of the tree, from the root to `node`. Released exactly once; using it afterwards is an error.

    While it lives, none of the path's pages is evicted. `num_pages` is the length of the path.
    """

    __slots__ = ("_node", "num_pages", "priority")

    def __init__(self, node: Node, num_pages: int, priority: int) -> None:
        self._node: Node | None = node
        self.num_pages = num_pages
        self.priority = priority

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
