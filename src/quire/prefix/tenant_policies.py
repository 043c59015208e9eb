"""TenantPolicies: an eviction policy for each tenant, and the choice of the tenant that loses the next page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count

from quire.counters import added
from quire.lazy_queue import LazyQueue
from quire.plan.budget import MemoryPlan
from quire.prefix.forecast import Forecast
from quire.prefix.node import Node, Returned
from quire.prefix.policy import EvictionPolicy, live
from quire.spec.ending import Ending
from quire.spec.events import Namespace
from quire.spec.ids import Ids


class TenantShares:
    """What a cache knows of its tenants, by their numbers. In this class there is one."""

    num_tenants = 1

    def number(self, namespace: Namespace) -> int:
        """The tenant of a namespace."""
        return 0

    def name(self, tenant: int) -> str:
        """What a tenant is called; "" where there is one."""
        return ""

    def losers(self) -> Iterable[int]:
        """Tenants that may lose cached pages now, in the order in which they lose them."""
        return (0,)

    def may_lose(self, node: Node) -> int:
        """How many of the last pages of a leaf its tenant may lose now."""
        return sys.maxsize

    def is_over(self, namespace: Namespace) -> bool:
        """Whether what a namespace keeps may end for the request that was asked for last."""
        return True

    def is_capped(self, namespace: Namespace) -> bool:
        """Whether its tenant has a ceiling."""
        return False

    def promised_in(self, plan: MemoryPlan) -> int:
        """Pages of all floors together, of a cache of this size."""
        return 0

    def passes(self, namespace: Namespace) -> bool:
        """A waiting request of this namespace lacks room: whether others may begin before it."""
        return False

    def blocks(self, namespace: Namespace, num_pages: int) -> str:
        """Why a request of so many pages does not begin after one that lacks room; "" if it may."""
        return ""

    def got_pages(self, pages: Ids, tenant: int) -> None:
        """New pages are a tenant's."""

    def got_row(self, row: int, tenant: int) -> None:
        """A row is that of a tenant's request."""


ONE_TENANT = TenantShares()


class TenantPolicies(EvictionPolicy):
    """A leaf is a candidate of the policy of its tenant. `shares` says which tenant loses next, and how much."""

    takes_first = True

    def __init__(self, make: Callable[[], EvictionPolicy], shares: TenantShares) -> None:
        self._policies = [make() for _ in range(shares.num_tenants)]
        self.knows_worth = self._policies[0].knows_worth
        self._first: list[LazyQueue[Node]] = [LazyQueue(live) for _ in range(shares.num_tenants)]
        self._tickets = count(1)
        self._shares = shares

    def timed_by(self, seconds: Callable[[], float]) -> None:
        for policy in self._policies:
            policy.timed_by(seconds)

    def used(self, node: Node) -> None:
        self._policies[node.tenant].used(node)

    def stored(self, node: Node, num_pages: int, returned: Returned) -> None:
        self._policies[node.tenant].stored(node, num_pages, returned)

    def merged(self, child: Node, parent: Node) -> None:
        self._policies[child.tenant].merged(child, parent)

    def priced_by(self, growth: float) -> None:
        for policy in self._policies:
            policy.priced_by(growth)

    def ended(self, node: Node) -> tuple[int, object]:
        return node.tenant, self._policies[node.tenant].ended(node)

    def told(self, memo: object, ending: Ending) -> None:
        assert isinstance(memo, tuple)
        self._policies[memo[0]].told(memo[1], ending)

    def forecast(self, node: Node) -> Forecast | None:
        return self._policies[node.tenant].forecast(node)

    def worth(self, node: Node) -> float:
        return self._policies[node.tenant].worth(node)

    def offered(self, node: Node) -> None:
        if not node.goes_first:
            self._policies[node.tenant].offered(node)
        else:
            node.ticket = -next(self._tickets)  # the tickets of policies are above 0
            self._first[node.tenant].push(node.ticket, node)

    def victim(self) -> Node | None:
        for tenant in self._shares.losers():
            if (entry := self._first[tenant].pop()) is not None:
                entry.item.ticket = 0
                return entry.item
            if (node := self._policies[tenant].victim()) is not None:
                return node
        return None

    def most(self, node: Node) -> int:
        return min(node.num_pages, self._shares.may_lose(node))

    def counters(self) -> object | None:
        found = [policy.counters() for policy in self._policies]
        return None if found[0] is None else added(found)

    def candidates(self) -> Iterator[Node]:
        return chain(*self._first, *(policy.candidates() for policy in self._policies))
