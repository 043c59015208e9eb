"""Loop: one turn schedules a step, launches it, and settles the one before. It names no feature: these are its parts.

Engine and simulator run it. The engine's device computes, the simulator's has the tokens in advance; the clock of one
is real, that of the other virtual.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.cache import KVCache
from quire.counters import Histogram, Section, counter, gauge, histogram
from quire.errors import QuireError, WrongContent
from quire.loop.part import Device, End, Launched, Part, StepResult
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Step
from quire.spec.events import Namespace

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LoopCounters:
    """What a loop has done, and what its queues hold. `waiting_reason` is that of the first request that waits."""

    steps: int = counter("Steps of the engine.")
    output_tokens: int = counter("Generated tokens.", vllm="generation_tokens")
    finished_requests: int = counter("Requests that ended by themselves.")
    aborted_requests: int = counter("Requests that the client gave up.")
    refused_requests: int = counter("Requests that could never fit or were invalid.")
    failed_requests: int = counter("Requests that a failed step ended.")
    preemptions: int = counter("Times a running request had to give its pages back.", vllm="num_preemptions")
    running_requests: int = gauge("Requests that hold pages.", vllm="num_requests_running")
    waiting_requests: int = gauge("Requests that wait for room.", vllm="num_requests_waiting")
    waiting_reason: str = ""
    queue_seconds: Histogram = histogram(
        "Sequence queued to admitted.", name="request_queue_time_seconds", vllm="request_queue_time_seconds"
    )


class Loop:
    """The steps of one cache, single-threaded. With `overlaps` a step is launched before the one before it has settled.
    `seconds` is the clock. Hooks of parts are called in the order of `parts`."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCache,
        device: Device,
        parts: Sequence[Part],
        *,
        overlaps: bool,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.cache = cache
        self.overlaps = overlaps
        self.parts = tuple(parts)
        self.queue_s = Histogram()
        self.num_steps = self.num_tokens = 0
        self.ends = dict.fromkeys(End, 0)
        self.device = device
        self._seconds = seconds
        self._in_flight: Launched | None = None
        self._began = self._settled_at = 0.0  # the last turn, and the last step
        self._has_ends = False  # since the last step
        self._halted: QuireError | None = None
        self._before_schedule = self._hooks("before_schedule")
        self._scheduled = self._hooks("scheduled")
        self._launched = self._hooks("launched")
        self._settling = self._hooks("settling")
        self._after_settle = self._hooks("settled")
        self._ended = self._hooks("ended")
        self._idle = self._hooks("idle")
        self._after_step = self._hooks("after_step")
        for part in self.parts:
            part.attach(self)

    def _hooks(self, name: str) -> tuple[Callable[..., None], ...]:
        """This hook of the parts that override it."""
        return tuple(getattr(part, name) for part in self.parts if getattr(type(part), name) is not getattr(Part, name))

    # -- requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises QuireError if it can never run, or if the loop is halted; nothing changes then."""
        if self._halted is not None:
            raise self._halted.with_traceback(None)  # else each raise would add its frames, and what they hold
        try:
            self.scheduler.add(request)
        except QuireError:
            self.refused()
            raise
        request.queued_s = self._seconds()

    def refused(self) -> None:
        """Count a request that can never run."""
        self.ends[End.REFUSED] += 1

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        """End a request at any moment; ids of none are ignored. With `stopped`, its text ended on a stop string, which
        only its reader sees: it has all its tokens."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._end(request, End.FINISHED if stopped else End.ABORTED)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request whose step failed."""
        self.scheduler.abort(request.request_id, failed=True)
        self._end(request, End.FAILED, error)

    def halt(self, error: QuireError) -> None:
        """Admit no more requests: `add` raises this. Those that run go on."""
        self._halted = error

    @property
    def is_busy(self) -> bool:
        """Whether requests wait or run, or a step is in flight."""
        return self.scheduler.has_requests or self._in_flight is not None

    @property
    def has_work(self) -> bool:
        """Whether `is_busy`, or a request has ended since the last step."""
        return self.is_busy or self._has_ends

    # -- one turn

    def step(self) -> None:
        """Schedule and launch a step, and settle the one before it, or this one without overlap."""
        self._began = self._seconds()
        for hook in self._before_schedule:
            hook()
        step, previous = self.scheduler.schedule(), self._in_flight
        for request in step.admitted:
            self.queue_s.observe(self._seconds() - request.queued_s)
        for hook in self._scheduled:
            hook(step)
        launched = self._launch(step) if len(step) else None
        if not len(step) and previous is None and not self._has_ends:
            for hook in self._idle:
                hook()
        self._in_flight = launched
        if previous is not None:
            self._settle(previous)
        if launched is not None and not self.overlaps:
            self.drain()
        for hook in self._after_step:
            hook(idle=launched is None)
        self._has_ends = False

    def drain(self) -> None:
        """Settle the step in flight, if there is one."""
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            self._settle(launched)

    def _launch(self, step: Step) -> Launched | None:
        self.num_steps += 1
        try:
            launched = self.device.launch(step, self._in_flight)
        except (AssertionError, WrongContent):
            raise  # a broken invariant: no later result can be trusted
        except Exception as error:
            logger.exception("a step of %d requests failed", len(step))
            for request in step.requests:
                self.fail(request, error)
            return None
        for hook in self._launched:
            hook(launched)
        return launched

    def _settle(self, launched: Launched) -> None:
        result = StepResult(launched, launched.wait())
        # What a step costs begins with its launch, or with the end of the step before; without overlap it begins with
        # the turn, since requests that decode wait while others are admitted.
        began = max(launched.began, self._settled_at) if self.overlaps else self._began
        self._settled_at = self._seconds()
        if not launched.waits:
            self.scheduler.measured(launched.step, self._settled_at - began)
        for hook in self._settling:
            hook(result)
        tokens = result.tokens if result.order is None else result.tokens[result.order]
        found = result.settled = self.scheduler.settle(launched.step, tokens, result.kept)
        self.cache.close_fence(launched.fence)
        self.num_tokens += len(found.tokens)
        noted = [found.requests[at] for at in found.noted]
        done = [
            request for request in noted if request.finish_reason is not None
        ]  # before hooks, which may abort others
        for hook in self._after_settle:
            hook(result)
        for request in done:
            self._end(request, End.FINISHED)

    def _end(self, request: Request, end: End, error: Exception | None = None) -> None:
        self._has_ends = True
        self.ends[end] += 1
        for hook in self._ended:
            hook(request, end, error)

    # -- all parts

    @property
    def is_due(self) -> bool:
        """Whether a part asks for a step although there is no work."""
        return any(part.is_due for part in self.parts)

    def flush(self, namespace: Namespace | None) -> None:
        """The cached pages of a namespace, or of all, are deleted."""
        for part in self.parts:
            part.flush(namespace)

    def model_changed(self, epoch: int) -> None:
        """The weights were replaced; call it with no step in flight."""
        for part in self.parts:
            part.model_changed(epoch)

    def counters(self) -> list[Section]:
        """Those of the loop, of its scheduler and of its parts."""
        scheduler, waiting = self.scheduler, self.scheduler.waiting
        counted = LoopCounters(
            steps=self.num_steps,
            output_tokens=self.num_tokens,
            **{f"{end}_requests": count for end, count in self.ends.items()},
            preemptions=scheduler.num_preemptions,
            running_requests=scheduler.num_running,
            waiting_requests=len(waiting),
            waiting_reason=waiting[0].wait_reason if waiting else "",
            queue_seconds=self.queue_s,
        )
        own: list[Section] = [("", counted), ("chunk_budget", scheduler.chunks.counters())]
        return own + [section for part in self.parts for section in part.counters()]

    def close(self) -> None:
        """Close the parts, in their order; no request may be running."""
        for part in self.parts:
            part.close()
