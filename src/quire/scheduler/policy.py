"""Scheduling policies: in which order waiting requests are considered. One function each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from quire.cache.tenants import Tenants
from quire.errors import InvalidInput
from quire.scheduler.request import Request

LONGEST_SORTED_QUEUE = 128
"""Above this many waiting requests, matching each of them every step would cost more than it saves."""


SchedulingPolicy = Callable[[Sequence[Request], Callable[[Request], int]], Sequence[Request]]
"""The order in which to try to admit waiting requests, which come sorted by `Request.order`. The second argument gives
the number of cached tokens of a request's prompt."""


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


class TurnOfTenants:
    """A policy's order of each tenant's requests, and between tenants that of `Tenants.take_turns`: priorities are
    within a tenant."""

    def __init__(self, policy: SchedulingPolicy, tenants: Tenants) -> None:
        self._policy, self._tenants = policy, tenants

    def __call__(self, waiting: Sequence[Request], cached: Callable[[Request], int]) -> Sequence[Request]:
        queues: dict[int, deque[Request]] = {}
        for request in self._policy(waiting, cached):
            queues.setdefault(self._tenants.number(request.namespace), deque()).append(request)
        return self._tenants.take_turns(queues, lambda request: request.num_tokens)


def scheduling_policy(name: str, tenants: Tenants | None = None) -> SchedulingPolicy:
    """The policy of that name, for each of the tenants, if there are any. Raises InvalidInput, which lists the
    names."""
    if name not in POLICIES:
        raise InvalidInput(f"unknown scheduling policy '{name}'.", fix=f"use one of {', '.join(POLICIES)}.")
    return POLICIES[name] if tenants is None else TurnOfTenants(POLICIES[name], tenants)
