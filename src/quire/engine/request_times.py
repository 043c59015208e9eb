"""TimesPart: when a sequence was queued, admitted and launched, and drew its first token, for traces of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.engine.messages import SequenceTimes, TokenOutput
from quire.engine.reporting import Reporting
from quire.loop import End, Launched, Part, StepResult
from quire.scheduler.request import Request
from quire.scheduler.step import Step

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


class TimesPart(Part):
    """Reports the times of each sequence once, with its first token or its end. A step looks at no others."""

    def __init__(self, reporting: Reporting) -> None:
        self._reporting = reporting
        self._turn_began = 0.0
        self._prompts: dict[Request, tuple[SequenceTimes, int]] = {}  # with the outputs that they began with

    def before_schedule(self) -> None:
        self._turn_began = time.monotonic()

    def scheduled(self, step: Step) -> None:
        for request in step.admitted:
            times = SequenceTimes(queued=request.queued_s, matched=self._turn_began, admitted=time.monotonic())
            times.fetched = request.fetched
            self._prompts[request] = times, request.num_outputs

    def launched(self, launched: Launched) -> None:
        for request, (times, _) in self._prompts.items():
            if not times.launched and request.num_launched > request.num_cached:
                times.launched = launched.began  # a CPU has computed it by now

    def settled(self, result: StepResult) -> None:
        for request, (times, num_outputs) in [*self._prompts.items()]:
            if request.num_outputs > num_outputs or request.finish_reason is not None:
                times.first_token = time.monotonic()
                self._report(request)

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        if request in self._prompts:
            self._report(request)

    def _report(self, request: Request) -> None:
        times, _ = self._prompts.pop(request)
        self._reporting.note(TokenOutput(request_id=request.request_id, times=times))


def time_parts(engine: EngineCore) -> Iterator[Part]:
    """The part that reports times; none unless requests are traced."""
    if engine.config.otlp_traces_endpoint is not None:
        yield TimesPart(engine.reporting)
