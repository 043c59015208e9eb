"""Replays of several engines behind a router, on one virtual time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quire.offload import offload_of
from quire.plan.budget import MemoryPlan
from quire.plan.step_cost import CostModel
from quire.routing.upstream import Upstream
from quire.sim.arrivals import Arrivals, Inbox
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.result import first_token_times, percentiles
from quire.sim.routers import ROUTERS, Behind
from quire.sim.scripts import ScriptedRequest
from quire.sim.settings import Fleet
from quire.sim.together import turns
from quire.sim.trace_request import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasResult:
    """What requests saw of engines behind a router. Seconds are virtual ones. `hit_tokens` of the prompts were cached
    at the engine that answered. `ttft_s` and `queue_s`: percentiles 50, 95 and 99 of the time to the first token, and
    of the time until a request began. `imbalance`: the tokens that the busiest engine computed, prompts and answers,
    divided by the mean. `restarts` counts the caches that were lost, by a restart or a flush. `events` has what became
    of events: batches that were lost, and times that engines were asked for some again. `engines` has the requests,
    tokens and digest of each."""

    router: str
    replicas: int
    requests: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    ttft_s: tuple[float, ...]
    queue_s: tuple[float, ...]
    imbalance: float
    preemptions: int
    restarts: int
    seconds: float
    digest: str
    events: dict[str, int]
    engines: tuple[dict[str, int | str], ...]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached at the engine that answered."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not cached."""
        return self.prompt_tokens - self.hit_tokens

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"hit_rate": self.hit_rate, "computed_tokens": self.computed_tokens}


class _Share(Inbox[ScriptedRequest]):
    """The requests of one engine. As far as it knows, the next request of all may be its own."""

    def __init__(self, everything: Arrivals, on_end: Callable[[str, float], None]) -> None:
        super().__init__(on_end)
        self._everything = everything

    @property
    def next_time(self) -> float | None:
        times = [each for each in (super().next_time, self._everything.next_time) if each is not None]
        return min(times, default=None)


class Replicas:
    """Engines with the same plan, costs and settings behind a router (`quire.sim.routers.ROUTERS`). Used once."""

    def __init__(
        self,
        plan: MemoryPlan,
        cost: CostModel,
        settings: ReplaySettings,
        fleet: Fleet,
        router: str,
        trace: Trace,
        *,
        progress: Callable[[int], None] = lambda ended: None,
    ) -> None:
        self._name, self._fleet, self._progress = router, fleet, progress
        self.router = ROUTERS[router](trace, fleet, plan.page_size)
        self._arrivals = Arrivals(trace)
        self._behind = [
            Behind(Upstream(name=f"engine-{at}", role="engine", url="", failing_since_s=None))
            for at in range(fleet.num_replicas)
        ]
        self._places: dict[str, int] = {}  # key: a request that has not ended
        self._ends: Inbox[str] = Inbox()
        self._num_begun = self._num_ended = self._num_restarts = self._num_flushes = 0
        self.engines = [Replay(plan, cost, settings, parts=self.router.parts(at)) for at in range(fleet.num_replicas)]
        self._inboxes = [_Share(self._arrivals, self._ended) for _ in self.engines]
        for engine, inbox in zip(self.engines, self._inboxes, strict=True):
            engine.begin(inbox)
        self.router.begin(self.engines)

    def run(self) -> ReplicasResult:
        """Replay until every request has ended. Raises WrongContent or AuditFailure if a check fails."""
        for _ in turns(self.engines, self._arrivals, self._route, lambda: self._num_ended == self._num_begun):
            pass
        return self._result()

    def _route(self, request: ScriptedRequest) -> None:
        now = request.arrived
        self._lose_until(now)
        for request_id in self._ends.until(now):
            self._behind[self._places.pop(request_id)].end(request_id)
        at, num_tokens = self.router.choose(request, self._behind)
        self._num_begun += 1
        self._places[request.request_id] = at
        self._behind[at].begin(request, num_tokens)
        self._inboxes[at].push(now, request)

    def _ended(self, request_id: str, now: float) -> None:
        self._arrivals.ended(request_id, now)
        self._ends.push(now, request_id)
        self._num_ended += 1
        self._progress(self._num_ended)

    def _lose_until(self, now: float) -> None:
        """Caches are lost whose time has come."""
        restart_s, flush_s = self._fleet.restart_every, self._fleet.flush_every
        while restart_s and (time := restart_s * (self._num_restarts + 1)) <= now:
            self._lose(self._num_restarts % len(self.engines), time, restarted=True)
            self._num_restarts += 1
        while flush_s and (time := flush_s * (self._num_flushes + 1)) <= now:
            for at in range(len(self.engines)):
                self._lose(at, time, restarted=False)
            self._num_flushes += 1

    def _lose(self, engine: int, now: float, *, restarted: bool) -> None:
        offload_of(self.engines[engine].cache).flush(None)
        self.engines[engine].loop.flush(None)
        self.router.lost(engine, now, restarted=restarted)

    def _result(self) -> ReplicasResult:
        results = [engine.result() for engine in self.engines]
        records = [record for result in results for record in result.records]
        work = [result.prompt_tokens - result.hit_tokens + result.output_tokens for result in results]
        waits = np.array([each.admitted - each.arrived for each in records if each.admitted is not None])
        return ReplicasResult(
            router=self._name,
            replicas=len(results),
            requests=len(records),
            prompt_tokens=sum(result.prompt_tokens for result in results),
            hit_tokens=sum(result.hit_tokens for result in results),
            output_tokens=sum(result.output_tokens for result in results),
            ttft_s=percentiles(first_token_times(records)),
            queue_s=percentiles(waits),
            imbalance=max(work) * len(work) / max(1, sum(work)),
            preemptions=sum(result.preemptions for result in results),
            restarts=self._num_restarts + self._num_flushes * len(results),
            seconds=max((record.finished or 0.0 for record in records), default=0.0),
            digest=hashlib.sha256("".join(result.digest for result in results).encode()).hexdigest(),
            engines=tuple(
                {
                    "requests": len(each.records),
                    "prompt_tokens": each.prompt_tokens,
                    "hit_tokens": each.hit_tokens,
                    "output_tokens": each.output_tokens,
                    "digest": each.digest,
                }
                for each in results
            ),
            events=self.router.events(),
        )
