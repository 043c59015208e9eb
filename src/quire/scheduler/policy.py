"""Waiting requests, and policies: in which order these are considered. One function each."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

from quire.cache.tenants import Tenants
from quire.errors import InvalidInput
from quire.scheduler.request import Request
from quire.spec.events import Namespace

R = TypeVar("R")
_order = attrgetter("order")

LONGEST_SORTED_QUEUE = 128
"""Above this many waiting requests, matching each of them every step would cost more than it saves."""


SchedulingPolicy = Callable[[Sequence[Request], Callable[[Request], int]], Sequence[Request]]
"""The order in which to try to admit waiting requests, which come sorted by `Request.order`. The second argument gives
the number of cached tokens of a request's prompt. One that changes nothing returns the sequence itself."""


def first_come_first_served(waiting: Sequence[Request], cached: Callable[[Request], int]) -> Sequence[Request]:
    """Higher priority first, then by arrival."""
    del cached
    return waiting


def longest_prefix_match(waiting: Sequence[Request], cached: Callable[[Request], int]) -> Sequence[Request]:
    """The longest cached prefix first; by arrival among equals, and if the queue is long."""
    if len(waiting) > LONGEST_SORTED_QUEUE:
        return waiting
    return sorted(waiting, key=lambda request: (-request.priority, -cached(request), request.arrival))


POLICIES: dict[str, SchedulingPolicy] = {"fcfs": first_come_first_served, "lpm": longest_prefix_match}


class WaitingRequests:
    """Requests without memory, each with its `wait_reason`. A `policy` says in which order they are considered."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.requests: list[Request] = []
        """Sorted by `Request.order`."""
        self.num_tokens = 0
        self._policy = policy
        self.openings = Counter[int]()  # how many wait with each `Request.opening`

    def add(self, request: Request) -> None:
        """A request waits."""
        insort(self.requests, request, key=_order)
        self.num_tokens += request.num_tokens
        self.openings[request.opening] += 1

    def remove(self, request: Request) -> None:
        """A request waits no more."""
        _remove(self.requests, request)
        self.num_tokens -= request.num_tokens
        self.openings[request.opening] -= 1
        if not self.openings[request.opening]:
            del self.openings[request.opening]

    def in_order(self, cached: Callable[[Request], int]) -> Iterable[Request]:
        """Those that wait now, in the policy's order. The one that was given last may be removed meanwhile."""
        return list(self._policy(self.requests, cached))


class TenantsRequests(WaitingRequests):
    """The policy's order of each tenant's requests, and between tenants weighted fair queueing over tokens that were
    computed. So priorities are within a tenant."""

    def __init__(self, policy: SchedulingPolicy, tenants: Tenants) -> None:
        super().__init__(policy)
        self._tenants = tenants
        self._own = dict[int, list[Request]]()  # requests of each tenant, sorted by `Request.order`
        self._spent = [0.0] * tenants.num_tenants  # tokens of each tenant's requests, divided by its weight
        self._now = 0.0  # what that was before the last one that began

    def add(self, request: Request) -> None:
        super().add(request)
        insort(self._own.setdefault(self._tenants.number(request.namespace), []), request, key=_order)

    def remove(self, request: Request) -> None:
        super().remove(request)
        number = self._tenants.number(request.namespace)
        _remove(self._own[number], request)
        if not self._own[number]:
            del self._own[number]

    def in_order(self, cached: Callable[[Request], int]) -> Iterable[Request]:
        ordered, queues = self._policy(self.requests, cached), self._own
        if ordered is not self.requests:
            queues = {}
            for request in ordered:
                queues.setdefault(self._tenants.number(request.namespace), []).append(request)
        return self.take_turns(queues, lambda request: request.num_tokens)

    def take_turns(self, queues: Mapping[int, Sequence[R]], cost: Callable[[R], int]) -> Iterator[R]:
        """Requests of several tenants, each tenant's in its own order, and after one whose tenant is blocked none of
        it. A round of admissions begins. O(log tenants) for each request, and the copy of each queue that is begun."""
        turns, spent = self._tenants, self._spent
        turns.begin_round()
        for number in queues:  # who was away, or could not begin, has saved nothing
            spent[number] = max(spent[number], self._now)
        heap, left = [(spent[number], number) for number in queues], dict[int, deque[R]]()
        heapq.heapify(heap)
        while heap:
            at, number = heap[0]
            own = left.get(number) or left.setdefault(number, deque(queues[number]))
            request = own.popleft()
            yield request
            if own and not turns.is_blocked(number):
                heapq.heapreplace(heap, (at + cost(request) / turns.terms[number].weight, number))
            else:
                heapq.heappop(heap)

    def charge(self, namespace: Namespace, num_tokens: int, *, begins: bool = False) -> None:
        """A request of this namespace takes so many tokens of steps, now that it `begins` or after it."""
        number = self._tenants.number(namespace)
        if begins:
            self._now = max(self._now, self._spent[number])
        self._spent[number] += num_tokens / self._tenants.terms[number].weight


def scheduling_policy(name: str, tenants: Tenants | None = None) -> WaitingRequests:
    """A queue with the policy of that name, for each of the tenants, if there are any. Raises InvalidInput, which lists
    the names."""
    if name not in POLICIES:
        raise InvalidInput(f"unknown scheduling policy '{name}'.", fix=f"use one of {', '.join(POLICIES)}.")
    return WaitingRequests(POLICIES[name]) if tenants is None else TenantsRequests(POLICIES[name], tenants)


def _remove(requests: list[Request], request: Request) -> None:
    del requests[bisect_left(requests, request.order, key=_order)]
