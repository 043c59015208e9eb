"""Replay: a trace through the real loop, scheduler and cache, on a simulated device and a virtual clock.

Only the device and the time are simulated. So a replay measures the production code: its hits, evictions and
preemptions, and its CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from quire.cache import KVCache
from quire.counters import plain
from quire.errors import InvalidInput, QuireError
from quire.loop import Loop, Part
from quire.loop.endings import EndingsPart
from quire.loop.tenants import parts_for_tenants
from quire.offload import Offloads, offload_of
from quire.plan.budget import MemoryPlan
from quire.plan.step_cost import CostModel
from quire.prefix.evict import DEFAULT_POLICY
from quire.scheduler.chunk_budget import chunk_budget
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.scheduler import Scheduler
from quire.settings.tenants import TenantTerms
from quire.sim.arrivals import Arrivals, Requests
from quire.sim.clock import VirtualClock
from quire.sim.device import SimulatedDevice, frames_of
from quire.sim.hisparse import SimulatedHiSparse, virtual_buffers
from quire.sim.recorder import Recorder
from quire.sim.resizing import SimulatedSizes, Sizes
from quire.sim.result import ReplayResult, percentiles
from quire.sim.scripts import ScriptedRequest, ending_of
from quire.sim.settings import SimulatedTiers
from quire.sim.speculation import simulated_drafts
from quire.sim.tiers import lower_tiers
from quire.sim.trace_request import TraceRequest
from quire.tiers.prefill import PrefillPeers

CHECKS = ("off", "reads", "all")
"""What a replay checks: nothing; every read of a step; and from time to time also the invariants of the cache."""

_POLL_S = 0.005  # between polls of transfers if nothing can be computed: the engine's value


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The engine's settings: the eviction policy, the order of waiting requests, the tokens of one step, whether a step
    is launched before the one before it has settled, the time between tokens that prompts are chunked for, what is
    checked, whether each record says why no more of its prompt was cached, the lower tiers, and the selections of hot
    buffers. A request is that of the tenant whose key its salt begins with. `acceptance` is the chance of a draft to be
    right, if the plan has speculation; None: as recorded. `eviction_worth` is what pages are kept for: tokens, or
    flops. `endings` are told to the policy, or hidden. The cache has other `sizes` from some times on."""

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
    eviction_worth: str = "tokens"
    endings: str = "hidden"
    tenants: tuple[TenantTerms, ...] = ()
    sizes: Sizes = ()

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise InvalidInput(f"'{self.check}' is not something to check.", fix=f"use one of {', '.join(CHECKS)}.")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise InvalidInput(f"an acceptance of {self.acceptance:g}.", fix="give a probability: 0 to 1.")


class _CpuTime:
    """Sums the CPU seconds of this thread inside its `with` blocks, without those inside `apart`."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.thread_time() - self._began

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave out what runs inside."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._began += time.thread_time() - began


class Waits(Part):
    """Time passes where nothing can be computed until bytes arrive. It polls as often as the engine does. `moves` are
    the next known events of what may bring bytes: None if nothing is under way, infinity if its time is not known."""

    def __init__(self, clock: VirtualClock, scheduler: Scheduler, moves: Sequence[Callable[[], float | None]]) -> None:
        self.arrives: Callable[[], float | None] = lambda: None
        """When the next request is known to arrive."""
        self._clock, self._scheduler, self._moves = clock, scheduler, moves

    def idle(self) -> None:
        times = [time for each in self._moves if (time := each()) is not None]
        if not times:
            assert self._scheduler.num_running, self._scheduler.waiting[0].wait_reason
            return
        times += [self._clock.now + _POLL_S, *(time for time in [self.arrives()] if time is not None)]
        self._clock.move_to(min(times))


class Replay:
    """One run: a cache of this plan, empty at first. Used once.

    `progress` is called with the number of requests that have ended, whenever one has. One of several engines
    (`quire.sim.roles`) may have `peers` that compute its prompts; `events` say when something is known to happen
    elsewhere, as in `Waits`. `parts` are features of the caller's own (`quire.loop.Part`).
    """

    def __init__(
        self,
        plan: MemoryPlan,
        cost: CostModel,
        settings: ReplaySettings,
        *,
        progress: Callable[[int], None] = lambda ended: None,
        peers: PrefillPeers | None = None,
        events: Sequence[Callable[[], float | None]] = (),
        parts: Sequence[Part] = (),
    ) -> None:
        self.clock = VirtualClock(cost)
        frames = frames_of(plan) if settings.check != "off" else None
        self.tiers = lower_tiers(settings.tiers, plan, cost, self.clock, frames, peers)
        self.cache = KVCache(
            plan,
            eviction=settings.policy,
            cost_growth=cost.growth if settings.eviction_worth == "flops" else 0.0,
            checkpoint_interval=settings.checkpoint_interval,
            explains=settings.explain,
            seconds=lambda: self.clock.now,
            offload=Offloads(self.tiers.settings),
            tenants=settings.tenants,
        )
        self.tiers.attach(self.cache)
        self.ahead = offload_of(self.cache).ahead
        self.scheduler = Scheduler(
            self.cache,
            scheduling_policy(settings.order, self.cache.parts.tenants),
            max_running=plan.max_requests,
            max_tokens=settings.chunk,
            ahead=self.ahead,
            chunks=chunk_budget(settings.target_itl_ms),
        )
        self._settings, self._progress = settings, progress
        self._arrivals: Requests = Arrivals(())
        self._manager = _CpuTime()
        audits = settings.check == "all"
        self.recorder = Recorder(self.cache, self.scheduler, self.clock, ended=self._ended, audits=audits)
        self._buffers = virtual_buffers(settings.hisparse, plan, cost)
        device = SimulatedDevice(
            self.cache,
            frames,
            self.clock,
            end_of=self.tiers.end_of,
            delays=[buffers.seconds for buffers in self._buffers],
            apart=self._manager.apart,
            overlap=settings.overlap,
        )
        self.drafts = simulated_drafts(
            plan, settings.acceptance, device.scripts, self.scheduler, device.move, overlap=settings.overlap
        )
        resizing = [SimulatedSizes(self.cache, settings.sizes, self.clock)] if settings.sizes else []
        later = [lambda: self.tiers.next_end, *(each.next_time for each in resizing), *events]
        self._waits = Waits(self.clock, self.scheduler, later)
        self._waits.arrives = lambda: self._arrivals.next_time
        told = [EndingsPart(ending_of)] if settings.endings == "told" else []
        self._tenants = parts_for_tenants(self.cache)
        for part, (_, smaller) in product(self._tenants, settings.sizes):
            part.fits(smaller)
        own = [*self.drafts, self._waits, *told, *self._tenants, *resizing, *parts, self.recorder]
        self.loop = Loop(
            self.scheduler, self.cache, device, own, overlaps=settings.overlap, seconds=lambda: self.clock.now
        )
        self._used = False
        self._began = time.perf_counter()

    def run(self, trace: Iterable[TraceRequest]) -> ReplayResult:
        """Replay until every request has ended. Raises WrongContent or AuditFailure if a check fails, and InvalidInput
        at the second call, because the cache is not empty any more."""
        if self._used:
            raise InvalidInput("this replay has run.", fix="make another Replay; its cache begins empty.")
        self.begin(Arrivals(trace))
        while self.loop.is_busy or self._arrivals.next_time is not None:
            self.turn()
        return self.result()

    # -- one of several engines

    def begin(self, arrivals: Requests) -> None:
        """Requests come from here."""
        self._arrivals, self._used = arrivals, True

    @property
    def next_time(self) -> float | None:
        """When it has something to do; None where no such time is known."""
        if self.loop.is_busy:
            return self.clock.now
        times = [each for each in (self.tiers.next_end, self._arrivals.next_time) if each is not None]
        return max(self.clock.now, min(times)) if times else None

    def turn(self) -> None:
        """A step, or the next transfer or request of an engine that has no other."""
        next_time = self.next_time
        assert next_time is not None
        self.clock.move_to(next_time)
        for request in self._arrivals.until(self.clock.now):
            self._add(request)
        if self.loop.is_busy:
            with self._manager:
                self.loop.step()
        else:
            self.ahead.settle_moves()

    def add(self, request: ScriptedRequest) -> None:
        """Queue a request. Raises QuireError if it can never run."""
        with self._manager:
            self.loop.add(request)
        self.recorder.added(request)

    def abort(self, request_id: str) -> None:
        """Abort a request, if it has not ended."""
        with self._manager:
            self.loop.abort(request_id)

    # -- inside

    def _add(self, request: ScriptedRequest) -> None:
        try:
            self.add(request)
        except QuireError as error:
            self.recorder.refused(request, error)

    def _ended(self, request_id: str, now: float) -> None:
        self._arrivals.ended(request_id, now)
        self._progress(len(self.recorder.records))

    def result(self) -> ReplayResult:
        """The results so far."""
        if self._settings.check == "all":
            self.cache.audit()
        recorder, loop, statistics = self.recorder, self.loop, self.cache.statistics()
        evicted = statistics.evicted_pages * self.cache.page_size
        preemptions = self.scheduler.num_preemptions
        recorder.digest.update(repr((statistics.prompt_tokens, statistics.hit_tokens, evicted, preemptions)).encode())
        return ReplayResult(
            policy=self._settings.policy,
            page_size=self.cache.page_size,
            pool_tokens=self.cache.plan.num_tokens,
            records=tuple(recorder.records),
            prompt_tokens=statistics.prompt_tokens + recorder.refused_tokens,
            refused_tokens=recorder.refused_tokens,
            hit_tokens=statistics.hit_tokens,
            evicted_tokens=evicted,
            preemptions=preemptions,
            steps=loop.num_steps,
            seconds=self.clock.now,
            manager_seconds=self._manager.seconds,
            wall_seconds=time.perf_counter() - self._began,
            digest=recorder.digest.hexdigest(),
            checked=self._settings.check,
            occupancy=tuple(recorder.occupancy.samples),
            most_running=recorder.most_running,
            mean_running=recorder.all_running / max(1, loop.num_steps),
            tiers=self.tiers.use(),
            hisparse=next((buffers.use() for buffers in self._buffers), None),
            itl_s=percentiles(recorder.gaps.all()),
            chunk_budget=plain(self.scheduler.chunks.counters()),
            speculation=next((plain(part.counted()) for part in self.drafts), None),
            tenants=next((plain(part.states()) for part in self._tenants), None),
        )
