"""EvictionPolicy: the calls from the tree to its eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from quire.prefix.forecast import Forecast
from quire.prefix.node import Node, Returned
from quire.spec.ending import Ending


class EvictionPolicy(ABC):
    """Chooses among the leaves that no lease holds. It may store its own data in `Node.memo`: a split copies the memo
    to the upper part, and an evicted edge retains it.

        lease on a hit        used(end of the leased path)
        insert                stored(leaf, its new pages, the evicted edges that it caches again)
        a request ends        ended(its last node)
        last lease released   offered(leaf); that of a session is released later
        its reader says how   told(what ended() returned, ending)
        pages are needed      victim(), and how many of its pages may go: most(leaf); then the rest of the leaf is
                              offered again, or merged(leaf, parent), and the parent is offered if it is a leaf now
    """

    takes_first = False
    """Whether it orders the leaves that go first itself."""
    knows_worth = False

    def timed_by(self, seconds: Callable[[], float]) -> None:  # noqa: B027
        """The tree's clock, before any other call."""

    def priced_by(self, growth: float) -> None:  # noqa: B027
        """Page n of a path costs `1 + n * growth` times the first to compute. By default all cost the same."""

    def used(self, node: Node) -> None:  # noqa: B027 - most policies ignore it
        """A request begins on a hit that ends at this node. `last_used` and `hits` already include it."""

    def stored(self, node: Node, num_pages: int, returned: Returned) -> None:  # noqa: B027
        """The last `num_pages` pages of a leased leaf are new; they are all of its pages if the leaf is new."""

    def merged(self, child: Node, parent: Node) -> None:  # noqa: B027
        """The last page of `child` is evicted. `last_used` and `hits` of `parent` do not include the child's yet."""

    def ended(self, node: Node) -> object | None:
        """A request has ended at a node that is still leased. Returns what `told` gets."""
        return node.memo

    def told(self, memo: object, ending: Ending) -> None:  # noqa: B027
        """How the output of a request ended; `memo` is what `ended` returned."""

    def forecast(self, node: Node) -> Forecast | None:
        """When a node, cached or evicted, is expected to be used again; None if the policy does not know. O(1)."""
        return None

    def worth(self, node: Node) -> float:
        """If `knows_worth`, what a page of a node without leases is worth now, in any unit. O(1)."""
        return 0.0

    @abstractmethod
    def offered(self, node: Node) -> None:
        """The node is a leaf without leases: a candidate until the tree sets its `ticket` to 0."""

    @abstractmethod
    def victim(self) -> Node | None:
        """Remove and return the first candidate; None if there is none."""

    def most(self, node: Node) -> int:
        """How many of the last pages of a victim may go, at least one."""
        return node.num_pages

    def counters(self) -> object | None:
        """Counters of the policy, if it has any (`quire.counters`)."""
        return None

    @abstractmethod
    def candidates(self) -> Iterator[Node]:
        """All candidates, for audits. O(entries)."""


def live(ticket: int, node: Node) -> Node | None:
    """For the argument `live` of a policy's `LazyQueue`."""
    return node if ticket == node.ticket else None
