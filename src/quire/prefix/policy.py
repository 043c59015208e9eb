"""EvictionPolicy: what the tree tells a policy about its nodes, and what it asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from quire.prefix.node import Node


class EvictionPolicy(ABC):
    """Chooses among the leaves that no lease holds. It changes nothing in the tree, and may keep what it likes in
    `Node.memo`, which a split copies to the upper part and a ghost keeps.

        lease on a hit      used(end of the leased path)
        insert a new leaf   stored(leaf, memo of the deepest ghost that its tokens had left, if any)
        last lease gone     offered(leaf)
        a page is short     victim(); what is left of the leaf is offered again, or else
                            merged(leaf, parent), and the parent is offered if it is a leaf now
    """

    def used(self, node: Node) -> None:  # noqa: B027 - most policies need no word of it
        """A request begins on a hit that ends at this node. `last_used` and `hits` are stamped already."""

    def stored(self, node: Node, ghost: object | None) -> None:  # noqa: B027
        """A new leaf. `ghost` is the memo of the deepest evicted edge that its tokens bring back."""

    def merged(self, child: Node, parent: Node) -> None:  # noqa: B027
        """The last page of `child` is evicted; what was known of it may live on in its parent, whose own `last_used`
        and `hits` do not yet include the child's."""

    @abstractmethod
    def offered(self, node: Node) -> None:
        """The node is a leaf that nothing leases: a candidate from now on, until the tree sets `Node.ticket` to 0
        because it got a lease or a child, or is gone."""

    @abstractmethod
    def victim(self) -> Node | None:
        """Take the candidate that should go first, or None if there is none. It is no candidate any more."""

    @abstractmethod
    def candidates(self) -> Iterator[Node]:
        """All candidates, for audits. O(entries)."""


def live(ticket: int, node: Node) -> Node | None:
    """The node, where an entry of a policy's queue with that ticket still counts."""
    return node if ticket == node.ticket else None
