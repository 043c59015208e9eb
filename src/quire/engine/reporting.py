"""Reporting: what the steps of an engine tell its callers, and what ends that callers keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.sessions import Sessions
from quire.counters import Section
from quire.engine.device.runner import LaunchedForward
from quire.engine.messages import SequenceTimes, StepOutputs, TokenOutput, output_of
from quire.errors import QuireError, StepFailed
from quire.loop import End, Launched, Part, StepResult
from quire.observe.explain import Explanations
from quire.offload.parts import RetentionPart
from quire.scheduler.request import Request
from quire.scheduler.step import Step
from quire.spec.ending import Ending

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


class Reporting(Part):
    """Collects outputs until `take`. Requests for other engines have none."""

    def __init__(self) -> None:
        self._outputs = StepOutputs()

    def take(self) -> StepOutputs:
        """The outputs since the last call."""
        outputs, self._outputs = self._outputs, StepOutputs()
        return outputs

    def note(self, output: TokenOutput) -> None:
        """Report this with the next step."""
        self._outputs.noted.append(output)

    def settled(self, result: StepResult) -> None:
        """Most requests have one token and nothing else to report."""
        found, launched = result.settled, result.launched
        assert found is not None and isinstance(launched, LaunchedForward)
        logprobs = launched.logprobs(result.order)
        ids, tokens = [request.request_id for request in found.requests], found.tokens.tolist()
        apart = set(found.noted)
        if logprobs or len(tokens) > len(ids):
            apart |= {at for at, name in enumerate(ids) if name in logprobs or found.counts[at] > 1}
        if apart:
            stops = np.cumsum(found.counts).tolist()
            for at in sorted(apart):
                request, count = found.requests[at], int(found.counts[at])
                if request.is_for_peer:
                    continue
                output = output_of(
                    request,
                    token_ids=tokens[stops[at] - count : stops[at]],
                    logprobs=logprobs[ids[at]][:count] if ids[at] in logprobs else None,
                    finish_reason=request.finish_reason,
                    stop_token=request.stop_token,
                )
                self.note(output)
            tokens = [tokens[stop - 1] for at, stop in enumerate(stops) if at not in apart]
            ids = [name for at, name in enumerate(ids) if at not in apart]
        self._outputs.request_ids += ids
        self._outputs.token_ids += tokens

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        """A request that ended in a step was reported with its last token."""
        if request.is_for_peer or (error is None and request.finish_reason != "abort"):
            return
        output = TokenOutput(request_id=request.request_id, finish_reason="abort", session=request.grant)
        if error is not None:
            if not isinstance(error, QuireError):
                error = StepFailed(f"the step failed: {type(error).__name__}: {error}.", fix="send the request again.")
            output.finish_reason, output.error, output.status = "error", str(error), error.status
        self.note(output)


class ExplanationPart(Part):
    """Stores why no more of each prompt was cached, and tells clients that ask for it."""

    def __init__(self, explanations: Explanations, reporting: Reporting) -> None:
        self._explanations, self._reporting = explanations, reporting

    def scheduled(self, step: Step) -> None:
        for request in step.admitted:
            if request.explanation is None:
                continue
            self._explanations.add(request.request_id, request.explanation, request.owner)
            if request.explain:
                self._reporting.note(output_of(request, explanation=request.explanation))


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


class SessionsPart(Part):
    """The sessions of one cache."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def before_schedule(self) -> None:
        self._sessions.expire()

    def counters(self) -> list[Section]:
        return [("", self._sessions.counters())]

    def close(self) -> None:
        self._sessions.close_all()


def explanation_parts(engine: EngineCore) -> Iterator[Part]:
    """The part that explains; none where that is off."""
    if engine.config.explain:
        yield ExplanationPart(engine.explanations, engine.reporting)


def limit_of(request: Request) -> Ending | None:
    """What the engine knows of how an output ended."""
    return Ending.LENGTH if request.finish_reason == "length" else None


def keeping_parts(engine: EngineCore) -> Iterator[Part]:
    """The parts that end what callers keep: retentions and sessions. And what tells how outputs ended."""
    yield engine.endings
    yield RetentionPart(engine.offload.retention)
    yield SessionsPart(engine.cache.sessions)


def time_parts(engine: EngineCore) -> Iterator[Part]:
    """The part that reports times; none unless requests are traced."""
    if engine.config.otlp_traces_endpoint is not None:
        yield TimesPart(engine.reporting)
