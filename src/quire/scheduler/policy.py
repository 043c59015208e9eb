"""Scheduling policies: in which order waiting requests are considered. One class each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.errors import InvalidInput
from quire.scheduler.request import Request

LONGEST_SORTED_QUEUE = 128
"""Above this many waiting requests, matching each of them every step would cost more than it saves."""


class SchedulingPolicy(Protocol):
    """Orders the waiting requests, which come sorted by `Request.order`."""

    def arrange(self, waiting: Sequence[Request], cached: Callable[[Request], int]) -> Sequence[Request]:
        """The order in which to try to admit them; `cached` gives the number of cached tokens of a request's prompt."""


class FirstComeFirstServed:
    """Higher priority first, then by arrival."""

    def arrange(self, waiting: Sequence[Request], cached: Callable[[Request], int]) -> Sequence[Request]:
        return waiting


class LongestPrefixMatch:
    """The longest cached prefix first; by arrival among equals, and if the queue is long."""

    def arrange(self, waiting: Sequence[Request], cached: Callable[[Request], int]) -> Sequence[Request]:
        if len(waiting) > LONGEST_SORTED_QUEUE:
            return waiting
        return sorted(waiting, key=lambda request: (-request.priority, -cached(request), request.arrival))


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {"fcfs": FirstComeFirstServed, "lpm": LongestPrefixMatch}


def scheduling_policy(name: str) -> SchedulingPolicy:
    """The policy of that name. Raises InvalidInput, which lists the names."""
    if name not in POLICIES:
        raise InvalidInput(f"unknown scheduling policy '{name}'.", fix=f"use one of {', '.join(POLICIES)}.")
    return POLICIES[name]()
