"""Recorder: the part of a replay that records when its requests begin, get tokens and end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.cache import KVCache
from quire.cache.running import Lengths
from quire.errors import QuireError, RequestTooLarge, WrongContent
from quire.loop import End, Launched, Loop, Part, StepResult
from quire.plan.budget import counted
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Step
from quire.sim.clock import VirtualClock
from quire.sim.result import OccupancyLog, RequestRecord
from quire.sim.scripts import ScriptedRequest, scripted

_AUDIT_EVERY = 512  # steps


class Recorder(Part):
    """Records of one replay. `ended` is called with the name of each request that has ended, and the time. With
    `audits` it checks the invariants of the cache from time to time."""

    def __init__(
        self,
        cache: KVCache,
        scheduler: Scheduler,
        clock: VirtualClock,
        *,
        ended: Callable[[str, float], None],
        audits: bool,
    ) -> None:
        self.gaps = TokenGaps(cache.plan.max_requests)
        self.occupancy = OccupancyLog(cache, scheduler)
        self.records: list[RequestRecord] = []
        self.digest = hashlib.sha256()
        self.most_running = self.all_running = 0
        self.refused_tokens = 0
        self._cache, self._scheduler, self._clock = cache, scheduler, clock
        self._is_over, self._audits = ended, audits
        self._leaving: dict[str, ScriptedRequest] = {}  # running and waiting ones whose client will leave
        self._num_before = 0  # records before this step
        self._loop: Loop | None = None

    def attach(self, loop: Loop) -> None:
        self._loop = loop

    def added(self, request: ScriptedRequest) -> None:
        """A request waits. Its client may leave at once, or after some tokens."""
        assert self._loop is not None
        if request.abort_after is not None and request.abort_after < request.max_tokens:
            self._leaving[request.request_id] = request
            if request.abort_after == 0:
                self._loop.abort(request.request_id)

    def refused(self, request: ScriptedRequest, error: QuireError) -> None:
        """A request can never run."""
        self._record(request, End.REFUSED, self._refusal(request, error))
        if request.abort_after != 0:  # otherwise it would not have run in any pool
            self.refused_tokens += request.num_prompt_tokens

    def before_schedule(self) -> None:
        self._num_before = len(self.records)

    def scheduled(self, step: Step) -> None:
        for request in scripted(step.admitted):
            request.admitted = self._clock.now

    def launched(self, launched: Launched) -> None:
        running = self._scheduler.num_running
        self.most_running = max(self.most_running, running)
        self.all_running += running
        self.occupancy.launched(launched.began)

    def settled(self, result: StepResult) -> None:
        assert result.settled is not None
        self.gaps.settled(result.step, self._clock.now)
        for request in scripted(result.settled.requests[at] for at in result.settled.noted):
            if request.first_token is None:
                request.first_token = self._clock.now

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        (ended,) = scripted([request])
        if not np.array_equal(ended.tokens, ended.script[: ended.num_tokens]):
            raise WrongContent(f"request '{ended.request_id}' got tokens that were drawn for another.")
        ended.finished = self._clock.now
        self._leaving.pop(ended.request_id, None)
        self._record(ended, ended.finish_reason or "")

    def after_step(self, *, idle: bool) -> None:
        assert self._loop is not None
        for request in list(self._leaving.values()):
            if request.abort_after is not None and request.num_outputs >= request.abort_after:
                self._loop.abort(request.request_id)
        if len(self.records) > self._num_before:
            self.occupancy.ended(self._clock.now)
        if self._audits and self._loop.num_steps % _AUDIT_EVERY == 0:
            self._cache.audit()

    def _record(self, request: ScriptedRequest, end: str, refused: str = "") -> None:
        record = RequestRecord(
            request_id=request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_outputs,
            hit_tokens=request.num_cached,
            preemptions=request.num_preemptions,
            evicted_pages=self._cache.statistics().evicted_pages,
            end=end,
            arrived=request.arrived,
            admitted=request.admitted,
            first_token=request.first_token,
            finished=request.finished,
            refused=refused,
            explanation=request.explanation,
        )
        self.records.append(record)
        numbers = (record.hit_tokens, record.preemptions, record.evicted_pages, record.output_tokens)
        self.digest.update(f"{record.request_id!r} {end} {numbers}".encode())
        self.digest.update(request.output_tokens.tobytes())
        self._is_over(request.request_id, self._clock.now)

    def _refusal(self, request: ScriptedRequest, error: QuireError) -> str:
        """Why a request can never run, without the bytes of a pool whose size is in tokens."""
        plan, prompt, output = self._cache.resizing.plan, request.num_prompt_tokens, request.max_tokens
        if not isinstance(error, RequestTooLarge) or prompt + output <= plan.largest_request:
            return error.message
        return (
            f"{counted(prompt, 'prompt token')} and {counted(output, 'output token')} need "
            f"{counted(plan.pages_of(prompt + output), 'page')} of {counted(plan.page_size, 'token')}; the pool has "
            f"{plan.num_pages:,}, so it can never hold more than {counted(plan.largest_request, 'token')} in one "
            "request."
        )


class TokenGaps:
    """The times between tokens of requests, also across preemptions; `rows` run at once."""

    def __init__(self, rows: int) -> None:
        self._numbers: dict[str, int] = {}
        self._serials: Lengths = np.full(rows, -1, dtype=np.int64)
        self._of_row: Lengths = np.zeros(rows, dtype=np.int64)
        self._last = np.full(1024, np.nan)  # index: number of the request
        self._found: list[npt.NDArray[np.float64]] = []

    def settled(self, step: Step, now: float) -> None:
        """A step has drawn tokens."""
        rows, serials = step.batch.rows[step.drawers], step.batch.serials[step.drawers]
        for at in (self._serials[rows] != serials).nonzero()[0].tolist():
            name = step.requests[step.drawers[at]].request_id
            self._of_row[rows[at]] = self._numbers.setdefault(name, len(self._numbers))
        self._serials[rows] = serials
        if len(self._numbers) > len(self._last):
            self._last = np.concatenate((self._last, np.full(len(self._numbers), np.nan)))
        numbers = self._of_row[rows]
        gaps = now - self._last[numbers]
        self._last[numbers] = now
        self._found.append(gaps[~np.isnan(gaps)])

    def all(self) -> npt.NDArray[np.float64]:
        """Seconds."""
        return np.concatenate([np.empty(0), *self._found])
