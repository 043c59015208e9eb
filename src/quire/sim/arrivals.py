"""Arrivals: the requests of a trace, when they come. Inbox: what is on its way to one engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from quire.sim.scripts import ScriptedRequest
from quire.sim.trace_request import TraceRequest

T = TypeVar("T")


class Requests(Protocol):
    """Where the requests of one engine come from."""

    @property
    def next_time(self) -> float | None:
        """The earliest known time of the next arrival."""

    def until(self, now: float) -> Iterator[ScriptedRequest]:
        """Requests that have arrived by `now`, in order."""

    def ended(self, request_id: str, now: float) -> None:
        """A request has finished, or was aborted or refused."""


class Inbox(Generic[T]):
    """Messages or requests on their way to one engine. `on_end` is called with the name of each request that has ended,
    and the time."""

    def __init__(self, on_end: Callable[[str, float], None] = lambda request_id, now: None) -> None:
        self._on_end = on_end
        self._due: list[tuple[float, int, T]] = []  # heap: arrival, order of `push`, item
        self._order = 0

    def __len__(self) -> int:
        return len(self._due)

    @property
    def next_time(self) -> float | None:
        """The earliest known time of the next arrival."""
        return self._due[0][0] if self._due else None

    def push(self, time: float, item: T) -> None:
        """An item that will arrive at its time."""
        heapq.heappush(self._due, (time, self._order, item))
        self._order += 1

    def until(self, now: float) -> Iterator[T]:
        """What has arrived by `now`, in order."""
        while self._due and self._due[0][0] <= now:
            yield heapq.heappop(self._due)[2]

    def ended(self, request_id: str, now: float) -> None:
        """A request has finished, or was aborted or refused."""
        self._on_end(request_id, now)


class Arrivals(Inbox[ScriptedRequest]):
    """The requests of a trace in the order of their arrival.

    A request is read from the trace, and its tokens are built, when the clock has reached its own arrival. A follow-up
    then waits until the turn before it has ended and the think time has passed. `ended` reports every end.
    """

    def __init__(self, trace: Iterable[TraceRequest]) -> None:
        super().__init__()
        self._unread = iter(trace)
        self._next = next(self._unread, None)
        self._following: dict[str, list[TraceRequest]] = {}  # key: the turn before
        self._ended: dict[str, float | None] = {}  # key: request that was read; None while it is not over

    @property
    def next_time(self) -> float | None:
        """The earliest known time of the next arrival; None if all remaining requests wait for other turns."""
        times = [super().next_time, self._next.arrival if self._next is not None else None]
        return min((time for time in times if time is not None), default=None)

    def until(self, now: float) -> Iterator[ScriptedRequest]:
        while self._next is not None and self._next.arrival <= now:
            self._read(self._next)
            self._next = next(self._unread, None)
        return super().until(now)

    def ended(self, request_id: str, now: float) -> None:
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
        self.push(time, ScriptedRequest(request, time))
