"""Replay: a trace through the real scheduler and the real cache, on a simulated device and a virtual clock.

The loop is the engine's: schedule, launch, settle, one step ahead with `overlap`. Only the device and the time are
simulated. So a replay measures the production code: its hits, evictions and preemptions, and its CPU time.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.cache import KVCache
from quire.cache.running import Lengths
from quire.errors import InvalidInput, QuireError, RequestTooLarge, WrongContent
from quire.offload import Offloads, offload_of
from quire.plan.budget import MemoryPlan, counted
from quire.plan.step_cost import CostModel
from quire.prefix.evict import DEFAULT_POLICY
from quire.scheduler.chunk_budget import chunk_budget
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Step
from quire.sim.clock import VirtualClock
from quire.sim.device import SimulatedDevice, SimulatedStep, frames_of
from quire.sim.hisparse import SimulatedHiSparse, VirtualBuffers
from quire.sim.result import OccupancyLog, ReplayResult, RequestRecord, percentiles
from quire.sim.scripts import ScriptedRequest, SimulatedDrafter, scripted
from quire.sim.tiers import LAYER, SimulatedTiers, VirtualTiers
from quire.sim.trace_request import TraceRequest
from quire.speculative.speculator import Speculator
from quire.tiers.prefill import PrefillPeers

CHECKS = ("off", "reads", "all")
"""What a replay checks: nothing; every read of a step; and from time to time also the invariants of the cache."""

_AUDIT_EVERY = 512  # steps
_POLL_S = 0.005  # between polls of transfers if nothing can be computed: the engine's value


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The engine's settings: the eviction policy, the order of waiting requests, the tokens of one step, whether a step
    is launched before the one before it has settled, the time between tokens that prompts are chunked for, what is
    checked, whether each record says why no more of its
    prompt was cached, the lower tiers, and the selections of a plan with hot buffers. `acceptance` is the chance of a
    draft to be right if the plan has speculation; None: as recorded in the trace."""

    policy: str = DEFAULT_POLICY
    order: str = "fcfs"
    chunk: int = 2048
    overlap: bool = False
    target_itl_ms: float | str = "off"
    check: str = "off"
    checkpoint_interval: int = 512
    explain: bool = False
    tiers: SimulatedTiers | None = None
    hisparse: SimulatedHiSparse | None = None
    acceptance: float | None = None

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise InvalidInput(f"'{self.check}' is not something to check.", fix=f"use one of {', '.join(CHECKS)}.")
        if self.chunk < 1:
            raise InvalidInput(f"a step of {self.chunk} tokens.", fix="give at least 1.")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise InvalidInput(f"an acceptance of {self.acceptance:g}.", fix="give a probability: 0 to 1.")


class _CpuTime:
    """Sums the CPU seconds of this thread inside its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.thread_time() - self._began


class Replay:
    """One run: a cache of this plan, empty at first. Used once.

    `progress` is called with the number of requests that have ended, whenever one has. One of several engines
    (`quire.sim.roles`) has `peers` that compute its prompts, or calls `served` when it has computed one for another.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        cost: CostModel,
        settings: ReplaySettings,
        *,
        progress: Callable[[int], None] = lambda ended: None,
        peers: EnginePeers | None = None,
        served: Callable[[ScriptedRequest], None] = lambda request: None,
    ) -> None:
        if settings.overlap and plan.speculation is not None:
            raise InvalidInput("drafts follow the tokens of the last step.", fix="leave --overlap or --speculate out.")
        self.clock = VirtualClock(cost)
        frames = frames_of(plan) if settings.check != "off" else None
        self.tiers = (
            VirtualTiers(settings.tiers, plan, cost, self.clock, frames, peers) if settings.tiers is not None else None
        )
        self.cache = KVCache(
            plan,
            eviction=settings.policy,
            checkpoint_interval=settings.checkpoint_interval,
            explains=settings.explain,
            seconds=lambda: self.clock.now,
            offload=Offloads(self.tiers.settings if self.tiers is not None else None),
        )
        self.ahead = offload_of(self.cache).ahead
        self.scheduler = Scheduler(
            self.cache,
            scheduling_policy(settings.order),
            max_running=plan.max_requests,
            max_tokens=settings.chunk,
            ahead=self.ahead,
            chunks=chunk_budget(settings.target_itl_ms),
        )
        self.device = SimulatedDevice(self.cache, frames, overlap=settings.overlap)
        self.speculator: Speculator | None = None
        if plan.speculation is not None:
            drafter = SimulatedDrafter(self.device.scripts, settings.acceptance)
            self.speculator = Speculator(drafter, None, plan.tokens_per_step - 1)
        self._buffers = VirtualBuffers(settings.hisparse, plan, cost) if settings.hisparse is not None else None
        self._settings = settings
        self._progress = progress
        self._peers = peers
        self.gaps = TokenGaps(plan.max_requests)
        self._served = served
        self._carried = tuple(index for index, group in enumerate(self.cache.groups) if group.reach.in_place)
        self._arrivals: Requests = Arrivals(())
        self._leaving: dict[str, ScriptedRequest] = {}  # running and waiting ones whose client will leave
        self._in_flight: SimulatedStep | None = None
        self._settled_at = 0.0  # the time at which the last step settled
        self._steps = self._most_running = self._all_running = 0
        self._manager = _CpuTime()
        self._records: list[RequestRecord] = []
        self._digest = hashlib.sha256()
        self._refused_tokens = 0
        self._occupancy = OccupancyLog(self.cache, self.scheduler)
        self._used = False
        self._began = time.perf_counter()

    def run(self, trace: Iterable[TraceRequest]) -> ReplayResult:
        """Replay until every request has ended. Raises WrongContent or AuditFailure if a check fails, and InvalidInput
        at the second call, because the cache is not empty any more."""
        if self._used:
            raise InvalidInput("this replay has run.", fix="make another Replay; its cache begins empty.")
        self._used = True
        self._arrivals = Arrivals(trace)
        while True:
            for request in self._arrivals.until(self.clock.now):
                self._add(request)
            if self.scheduler.has_requests or self._in_flight is not None:
                self._step()
                continue
            following = self._arrivals.next_time
            if following is None:
                break
            self._idle(following)
        return self.result()

    # -- one of several engines

    def begin(self, arrivals: Requests) -> None:
        """Requests come from here."""
        self._arrivals, self._used = arrivals, True

    @property
    def next_time(self) -> float | None:
        """When it has something to do; None if nothing is known."""
        if self.is_busy:
            return self.clock.now
        ends = self.tiers.mover.next_end if self.tiers is not None else None
        times = [each for each in (ends, self._arrivals.next_time) if each is not None]
        return max(self.clock.now, min(times)) if times else None

    @property
    def num_peer_hits(self) -> int:
        """Prompt tokens that peers have computed for their requests."""
        below = offload_of(self.cache).tiers
        return below.counters.peer_hit_tokens if below is not None else 0

    @property
    def is_busy(self) -> bool:
        """Whether requests wait or run."""
        return self.scheduler.has_requests or self._in_flight is not None

    def turn(self) -> None:
        """A step, or the next transfer or request of an engine that has no other."""
        next_time = self.next_time
        assert next_time is not None
        self.clock.move_to(next_time)
        for request in self._arrivals.until(self.clock.now):
            self._add(request)
        if self.is_busy:
            self._step()
        else:
            self.ahead.settle_moves()

    def abort(self, request_id: str) -> None:
        """Abort a request, if it has not ended."""
        if any(request.request_id == request_id for request in self.scheduler.requests):
            with self._manager:
                self.scheduler.abort(request_id)

    # -- one turn of the loop

    def _step(self) -> None:
        """As `EngineCore.step`: schedule and launch, then settle the step before, or this one without overlap."""
        with self._manager:
            if self.speculator is not None:
                self._draft(self.speculator)
            step = self.scheduler.schedule()
        for request in scripted(step.admitted):
            request.admitted = self.clock.now
        launched = self._launch(step) if len(step) else None
        if launched is None and self._in_flight is None and not self._wait():
            assert self.scheduler.num_running, self.scheduler.waiting[0].wait_reason
        if self._in_flight is not None:
            self._settle(self._in_flight)
        self._in_flight = launched
        if launched is not None and not self._settings.overlap:
            self._settle(launched)
            self._in_flight = None

    def _draft(self, speculator: Speculator) -> None:
        batch, tokens, known, room = self.scheduler.drafting()
        drafts = speculator.propose(batch, tokens, known, room) if np.count_nonzero(room) else None
        if drafts is not None:
            self.scheduler.draft(batch, drafts.counts, drafts.tokens)

    def _wait(self) -> bool:
        """There is nothing to compute until bytes have arrived. Polls as often as the engine does."""
        asks = self._peers is not None and bool(self._peers.asks_open)
        if self.tiers is None or (self.tiers.mover.next_end is None and not asks):
            return False
        lands = self._peers.next_time if self._peers is not None else None
        times = [self.clock.now + _POLL_S, self.tiers.mover.next_end, lands, self._arrivals.next_time]
        self.clock.move_to(min(time for time in times if time is not None))
        return True

    def _idle(self, until: float) -> None:
        """There are no requests until then. Transfers go on."""
        while self.tiers is not None and (end := self.tiers.mover.next_end) is not None and end < until:
            self.clock.move_to(end)
            self.ahead.settle_moves()
        self.clock.move_to(until)

    def _launch(self, scheduled: Step) -> SimulatedStep:
        self._steps += 1
        self._most_running = max(self._most_running, self.scheduler.num_running)
        self._all_running += self.scheduler.num_running
        fence, ends = self.cache.open_fence(), scheduled.ends
        with self._manager:
            found = [self.cache.launch(index, scheduled.batch, ends, scheduled.draw_counts) for index in self._carried]
        pieces = {index: each for index, each in zip(self._carried, found, strict=True) if each is not None}
        launched = self.device.launch(scheduled, fence, pieces)
        self._occupancy.launched(self.clock.now)
        arrives = 0.0
        if self.tiers is not None:
            launched.loads = [load for kv in scheduled.batch.kvs for load in kv.loads if not load.done]
            arrives = max(map(self.tiers.mover.end_of, launched.loads), default=0.0)
        drafts = ends - launched.ends if self.speculator is not None else None
        launched.began = self.clock.now
        swap = self._buffers.seconds(scheduled) if self._buffers is not None else 0.0
        launched.done = self.clock.launch(scheduled.starts, ends, drafts=drafts, arrives=arrives, swap=swap)
        return launched

    def _settle(self, launched: SimulatedStep) -> None:
        step = launched.step
        for load in launched.loads:
            load.wait_layer(LAYER)  # as a forward pass does before it reads a layer
        drawn = self.device.settle(launched)
        self.clock.move_to(launched.done)
        began, self._settled_at = max(launched.began, self._settled_at), launched.done
        with self._manager:
            if not launched.loads:
                self.scheduler.measured(step, launched.done - began)
            kept = None
            if self.speculator is not None:
                kept = self.speculator.accepted(step.batch, step.tokens, step.draws, step.draw_counts, drawn).kept
            settled = self.scheduler.settle(step, drawn, kept)
            self.cache.close_fence(launched.fence)
        self.gaps.settled(step, self.clock.now)
        num_ended = len(self._records)
        for request in scripted(settled.requests[at] for at in settled.noted):
            if request.first_token is None:
                request.first_token = self.clock.now
            if request.finish_reason is not None:
                self._end(request)
        for request in list(self._leaving.values()):
            if request.abort_after is not None and request.num_outputs >= request.abort_after:
                self._abort(request)
        if len(self._records) > num_ended:
            self._occupancy.ended(self.clock.now)
        if self._settings.check == "all" and self._steps % _AUDIT_EVERY == 0:
            self.cache.audit()

    # -- requests

    def _add(self, request: ScriptedRequest) -> None:
        try:
            with self._manager:
                self.scheduler.add(request)
        except QuireError as error:
            self._record(request, "refused", self._refusal(request, error))
            if request.abort_after != 0:  # otherwise it would not have run in any pool
                self._refused_tokens += request.num_prompt_tokens
            return
        if request.abort_after is not None and request.abort_after < request.max_tokens:
            self._leaving[request.request_id] = request
            if request.abort_after == 0:
                self._abort(request)

    def _abort(self, request: ScriptedRequest) -> None:
        with self._manager:
            self.scheduler.abort(request.request_id)
        self._end(request)

    def _end(self, request: ScriptedRequest) -> None:
        if not np.array_equal(request.tokens, request.script[: request.num_tokens]):
            raise WrongContent(f"request '{request.request_id}' got tokens that were drawn for another.")
        request.finished = self.clock.now
        self._leaving.pop(request.request_id, None)
        self._record(request, request.finish_reason or "")

    def _record(self, request: ScriptedRequest, end: str, refused: str = "") -> None:
        if request.is_for_peer:
            request.finish_reason = end
            self._served(request)
            return
        record = RequestRecord(
            request_id=request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_outputs,
            hit_tokens=max(0, request.num_cached),
            preemptions=request.num_preemptions,
            evicted_pages=self.cache.statistics().evicted_pages,
            end=end,
            arrived=request.arrived,
            admitted=request.admitted,
            first_token=request.first_token,
            finished=request.finished,
            refused=refused,
            explanation=request.explanation,
        )
        self._records.append(record)
        numbers = (record.hit_tokens, record.preemptions, record.evicted_pages, record.output_tokens)
        self._digest.update(f"{record.request_id!r} {end} {numbers}".encode())
        self._digest.update(request.output_tokens.tobytes())
        self._arrivals.ended(request.request_id, self.clock.now)
        self._progress(len(self._records))

    def _refusal(self, request: ScriptedRequest, error: QuireError) -> str:
        """Why a request can never run, without the bytes of a pool whose size is in tokens."""
        plan, prompt, output = self.cache.plan, request.num_prompt_tokens, request.max_tokens
        if not isinstance(error, RequestTooLarge):
            return error.message
        return (
            f"{counted(prompt, 'prompt token')} and {counted(output, 'output token')} need "
            f"{counted(plan.pages_of(prompt + output), 'page')} of {counted(plan.page_size, 'token')}; the pool has "
            f"{plan.num_pages:,}, so it can never hold more than {counted(plan.largest_request, 'token')} in one "
            "request."
        )

    def result(self) -> ReplayResult:
        """The results so far."""
        if self._settings.check == "all":
            self.cache.audit()
        statistics = self.cache.statistics()
        evicted = statistics.evicted_pages * self.cache.page_size
        preemptions = self.scheduler.num_preemptions
        self._digest.update(repr((statistics.prompt_tokens, statistics.hit_tokens, evicted, preemptions)).encode())
        return ReplayResult(
            policy=self._settings.policy,
            page_size=self.cache.page_size,
            pool_tokens=self.cache.plan.num_tokens,
            records=tuple(self._records),
            prompt_tokens=statistics.prompt_tokens + self._refused_tokens,
            refused_tokens=self._refused_tokens,
            hit_tokens=statistics.hit_tokens,
            evicted_tokens=evicted,
            preemptions=preemptions,
            steps=self._steps,
            seconds=self.clock.now,
            manager_seconds=self._manager.seconds,
            wall_seconds=time.perf_counter() - self._began,
            digest=self._digest.hexdigest(),
            checked=self._settings.check,
            occupancy=tuple(self._occupancy.samples),
            most_running=self._most_running,
            mean_running=self._all_running / max(1, self._steps),
            tiers=self.tiers.use(self.cache) if self.tiers is not None else None,
            hisparse=self._buffers.use() if self._buffers is not None else None,
            itl_s=percentiles(self.gaps.all()),
            chunk_budget=self.scheduler.chunks.statistics(),
            speculation=self.speculator.statistics() if self.speculator is not None else None,
        )


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


class EnginePeers(PrefillPeers, Protocol):
    """Prefill engines of a replay."""

    @property
    def asks_open(self) -> Sequence[object]:
        """Prompts that they compute."""

    @property
    def next_time(self) -> float | None:
        """When the next known bytes arrive."""


class TokenGaps:
    """The times between tokens of requests, also across preemptions; `rows` run at once."""

    def __init__(self, rows: int) -> None:
        self._numbers: dict[str, int] = {}
        self._serials: Lengths = np.full(rows, -1, dtype=np.int64)
        self._of_row: Lengths = np.zeros(rows, dtype=np.int64)
        self._last = np.full(1024, np.nan)  # by number of the request
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
