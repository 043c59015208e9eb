"""Arrivals: which request of a trace comes when, on a virtual clock. Follow-ups come after what they follow."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from quire.sim.trace_request import TraceRequest


class Arrivals:
    """The requests of a trace in the order in which they come.

    A request is read from the trace, and its tokens are built, when the clock has reached its own arrival. A follow-up
    then waits until the turn before it has ended and the user has thought. Told of every end by `ended`.
    """

    def __init__(self, trace: Iterable[TraceRequest]) -> None:
        self._unread: Iterator[TraceRequest] = iter(trace)
        self._next = next(self._unread, None)
        self._due: list[tuple[float, int, TraceRequest]] = []
        self._order = 0
        self._following: dict[str, list[TraceRequest]] = {}  # by the turn before
        self._open: set[str] = set()  # turns that have been read and have not ended
        self._ended: dict[str, float] = {}

    @property
    def next_time(self) -> float | None:
        """When the next one may come, as far as is known; None where nothing is left but what waits for other turns."""
        times = [self._next.arrival] if self._next is not None else []
        times += [self._due[0][0]] if self._due else []
        return min(times, default=None)

    def until(self, now: float) -> Iterator[tuple[float, TraceRequest]]:
        """Requests that have come by `now`, each with the moment it came, in order."""
        while self._next is not None and self._next.arrival <= now:
            self._read(self._next)
            self._next = next(self._unread, None)
        while self._due and self._due[0][0] <= now:
            time, _, request = heapq.heappop(self._due)
            yield time, request

    def ended(self, request_id: str, now: float) -> None:
        """A request has finished, or was aborted or refused."""
        self._open.discard(request_id)
        self._ended[request_id] = now
        for request in self._following.pop(request_id, ()):
            self._push(now + request.think, request)

    def _read(self, request: TraceRequest) -> None:
        before = request.after
        self._open.add(request.request_id)
        if before in self._open:
            self._following.setdefault(before, []).append(request)
        elif before in self._ended:
            self._push(max(request.arrival, self._ended[before] + request.think), request)
        else:
            self._push(request.arrival, request)

    def _push(self, time: float, request: TraceRequest) -> None:
        heapq.heappush(self._due, (time, self._order, request))
        self._order += 1
