"""ScriptedRequest: a request whose output is known before it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np

from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.sim.trace_request import TraceRequest
from quire.spec.ids import Ids

_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)


class ScriptedRequest(Request):
    """A request of a trace in the real scheduler. `script` is its prompt and all of its output, int32.

    Times are seconds of the virtual clock, None until they come: `arrived` and `admitted` (for the first time),
    `first_token`, `finished`. `expected_row` is its row in the tables of a device that checks, -1 for none.
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
        self.arrived = arrived
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None
        self.expected_row = -1


def scripted(requests: Iterable[Request]) -> list[ScriptedRequest]:
    """The requests of a replay by their type: its scheduler is given no others."""
    return cast("list[ScriptedRequest]", list(requests))
