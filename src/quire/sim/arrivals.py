"""Requests of a trace in the scheduler: `ScriptedRequest`, whose output is known, and `Arrivals`, when each comes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np

from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.sim.trace_request import TraceRequest
from quire.spec.ids import Ids

_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)


class ScriptedRequest(Request):
    """A request of a trace in the real scheduler. `script` is its prompt and all of its output, int32.

    Times are seconds of the virtual clock, None until they are known: `arrived` and `admitted` (for the first time),
    `first_token`, `finished`.
    """

    def __init__(self, request: TraceRequest, arrived: float) -> None:
        output = request.output if len(request.output) else np.zeros(1, dtype=np.int32)
        super().__init__(
            request.request_id,
            request.prompt,
            _PARAMS,
            max_tokens=len(output),
            namespace=request.namespace,
            priority=request.priority,
        )
        self.script: Ids = np.concatenate((request.prompt, output))
        self.abort_after = request.abort_after
        self.acceptance = request.acceptance
        self.arrived = arrived
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None


def scripted(requests: Iterable[Request]) -> list[ScriptedRequest]:
    """The requests of a replay by their type: its scheduler has no others."""
    return cast("list[ScriptedRequest]", list(requests))


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
        self._following: dict[str, list[TraceRequest]] = {}  # by the turn before
        self._ended: dict[str, float | None] = {}  # by request that was read; None while it is not over

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
