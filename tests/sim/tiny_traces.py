"""Traces made of a few numbers, for tests that work out by hand what should come of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from quire.sim.trace import Trace, TraceRequest
from quire.sim.trace_request import Planned
from quire.spec.events import Namespace


def request(
    number: int, prompt: Sequence[int], output: Sequence[int], *, salt: str = "", abort_after: int | None = None
) -> TraceRequest:
    return TraceRequest(
        request_id=str(number),
        prompt=np.array(prompt, dtype=np.int32),
        output=np.array(output, dtype=np.int32),
        arrival=float(number),
        namespace=Namespace(salt=salt),
        abort_after=abort_after,
    )


def trace_of(requests: Sequence[TraceRequest]) -> Trace:
    return Trace("tiny", "a test", [Planned(each.arrival, lambda _, each=each: each) for each in requests])


def digest(trace: Trace) -> str:
    """Changes with any token and any field of any request."""
    found = hashlib.sha256()
    for each in trace:
        found.update(each.prompt.tobytes() + each.output.tobytes())
        fields = (each.arrival, each.session, each.namespace, each.after, each.think, each.priority, each.abort_after)
        found.update(repr((each.request_id, len(each.prompt), *fields)).encode())
    return found.hexdigest()[:16]
