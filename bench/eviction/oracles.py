"""Policies that know a part of the future of a trace: what that part is worth, between LRU and the optimum.

next        the next use of each page: with what runs pinned, nearly the optimum
octave      the same, to the power of two seconds below the gap
error1      the same, with an error of the gap of e ** N(0, 1); error2: of e ** N(0, 2)
dead        which pages are never used again; else LRU
over        which sessions are over; else LRU
branches    which pages of sessions that go on are never used again; else LRU
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from bench.eviction.paged_trace import PagedTrace

from quire.prefix.evict import Order
from quire.prefix.node import ID_BYTES, Node

Times = npt.NDArray[np.float64]


class Future:
    """When the pages of a trace are used again, and their sessions. `begin(number)` says which request begins."""

    def __init__(self, trace: PagedTrace) -> None:
        self._trace = list(trace)
        self._arrivals = trace.arrivals
        names, self._sessions = np.unique(trace.sessions, return_inverse=True)
        self.number = -1
        self._user = np.full(int(trace.ids.max()) + 1, -1)
        self._is_shared = np.zeros(len(self._user), dtype=np.bool_)
        for request, session in zip(self._trace, self._sessions.tolist(), strict=True):
            before = self._user[request.pages]
            self._is_shared[request.pages[(before >= 0) & (before != session)]] = True
            self._user[request.pages] = session
        self._uses = [list[int]() for _ in range(len(self._user))]  # requests that look a page up, the last first
        self._turns = [list[int]() for _ in names]
        for number in reversed(range(len(trace))):
            request = self._trace[number]
            for page in request.pages[: request.lookup_pages].tolist():
                self._uses[page].append(number)
            self._turns[self._sessions[number]].append(number)

    def begin(self, number: int) -> None:
        """A request begins: pages are its session's from now on."""
        self.number = number
        self._user[self._trace[number].pages] = self._sessions[number]

    def gap(self, node: Node) -> float:
        """Seconds until the last page of a node is looked up again; infinite if it is not."""
        return self._next(self._uses[_last(node)])

    def session_gap(self, node: Node) -> float:
        """Seconds until its session has another request, wherever; infinite if it has none. As `gap` for a page that
        several sessions use."""
        page = _last(node)
        return self.gap(node) if self._is_shared[page] else self._next(self._turns[self._user[page]])

    @property
    def now(self) -> float:
        """The arrival of the request that has begun last."""
        return float(self._arrivals[self.number])

    def _next(self, numbers: list[int]) -> float:
        while numbers and numbers[-1] <= self.number:
            numbers.pop()
        return float(self._arrivals[numbers[-1]]) - self.now if numbers else math.inf


def _last(node: Node) -> int:
    return int.from_bytes(node.run[-ID_BYTES:], "little")


def _seen(future: Future, gap: Callable[[float], float]) -> Callable[[Node], tuple[float, ...]]:
    """What is used last goes first, as far as `gap` shows it. What is overdue is used at once."""
    return lambda node: (-future.now - gap(future.gap(node)), node.last_used)


def oracle(name: str, future: Future) -> Order:
    """A new policy of this name. Pages' next uses do not depend on the policy, so the key of a leaf stays right until
    it is used; a guess is made when it becomes one."""
    draw = np.random.default_rng(0)

    def wrong(sigma: float) -> Callable[[float], float]:
        return lambda gap: gap * math.exp(draw.normal(0, sigma))

    keys: dict[str, Callable[[Node], tuple[float, ...]]] = {
        "next": _seen(future, lambda gap: gap),
        "octave": _seen(future, lambda gap: 2.0 ** math.floor(math.log2(max(gap, 1.0))) if gap < math.inf else gap),
        "error1": _seen(future, wrong(1.0)),
        "error2": _seen(future, wrong(2.0)),
        "dead": lambda node: (future.gap(node) < math.inf, node.last_used),
        "over": lambda node: (future.session_gap(node) < math.inf, node.last_used),
        "branches": lambda node: (future.gap(node) < math.inf or future.session_gap(node) == math.inf, node.last_used),
    }
    return Order(keys[name])


ORACLES = ("next", "octave", "error1", "error2", "dead", "over", "branches")
