"""TimedPolicy: an eviction policy with the CPU time that it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from quire.prefix.node import Node
from quire.prefix.policy import EvictionPolicy

_TIMED = ("used", "stored", "merged")


class TimedPolicy(EvictionPolicy):
    """Passes all calls to `policy`. `seconds` is the CPU time in them, without that of the clock itself."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._clock_ns = statistics.median(-time.thread_time_ns() + time.thread_time_ns() for _ in range(1000))
        self._ns = 0.0
        self.num_victims = 0
        for name in _TIMED:
            setattr(self, name, partial(self._timed, getattr(policy, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def seconds(self) -> float:
        """In all calls."""
        return self._ns / 1e9

    def timed_by(self, seconds: Callable[[], float]) -> None:
        self._policy.timed_by(seconds)

    def offered(self, node: Node) -> None:
        self._timed(self._policy.offered, node)

    def victim(self) -> Node | None:
        node: Node | None = self._timed(self._policy.victim)
        return node

    def candidates(self) -> Iterator[Node]:
        return self._policy.candidates()

    def _timed(self, call: Callable[..., Any], *given: Any) -> Any:
        began = time.thread_time_ns()
        found = call(*given)
        self._ns += time.thread_time_ns() - began - self._clock_ns
        self.num_victims += isinstance(found, Node)
        return found
