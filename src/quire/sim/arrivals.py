"""Arrivals: the requests of a trace, when they come. Requests: the port of a replay to where its requests come from."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from quire.sim.scripts import ScriptedRequest
from quire.sim.trace_request import TraceRequest


class Requests(Protocol):
    """Where the requests of one engine come from."""

    @property
    def next_time(self) -> float | None:
        """The earliest known time of the next arrival."""

    def until(self, now: float) -> Iterator[ScriptedRequest]:
        """Requests that have arrived by `now`, in order."""

    @property
    def ended(self) -> Callable[[str, float], None]:
        """Called with the name of a request that has finished, or was aborted or refused, and the time."""


class Arrivals:
    """The requests of a trace in the order of their arrival.

    A request is read from the trace, and its tokens are built, when the clock has reached its own arrival. A follow-up
    then waits until the turn before it has ended and the think time has passed. `ended` reports every end.
    """

    def __init__(self, trace: Iterable[TraceRequest]) -> None:
        self._unread = iter(trace)
        self._next = next(self._unread, None)
        self._due: list[tuple[float, int, TraceRequest]] = []  # heap: arrival, order of reading, request
        self._order = 0
        self._following: dict[str, list[TraceRequest]] = {}  # key: the turn before
        self._ended: dict[str, float | None] = {}  # key: request that was read; None while it is not over

    @property
    def next_time(self) -> float | None:
        """The earliest known time of the next arrival; None if all remaining requests wait for other turns."""
        times = [self._next.arrival] if self._next is not None else []
        times += [self._due[0][0]] if self._due else []
        return min(times, default=None)

    def until(self, now: float) -> Iterator[ScriptedRequest]:
        """Requests that have arrived by `now`, in order."""
        while self._next is not None and self._next.arrival <= now:
            self._read(self._next)
            self._next = next(self._unread, None)
        while self._due and self._due[0][0] <= now:
            time, _, request = heapq.heappop(self._due)
            yield ScriptedRequest(request, time)

    def ended(self, request_id: str, now: float) -> None:
        """A request has finished, or was aborted or refused."""
        self._ended[request_id] = now
        for request in self._following.pop(request_id, ()):
            self._push(now + request.think, request)

    def _read(self, request: TraceRequest) -> None:
        self._ended[request.request_id] = None
        if request.after not in self._ended:
            self._push(request.arrival, request)
        elif (ended := self._ended[request.after]) is not None:
            self._push(max(request.arrival, ended + request.think), request)
        else:
            self._following.setdefault(request.after, []).append(request)

    def _push(self, time: float, request: TraceRequest) -> None:
        heapq.heappush(self._due, (time, self._order, request))
        self._order += 1
