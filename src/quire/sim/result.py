"""ReplayResult: the results of a replay, request by request and in total. JSON, tables and plots read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.cache import KVCache
from quire.counters import plain
from quire.observe.explain import Cause, Explanation
from quire.scheduler.scheduler import Scheduler
from quire.sim.hisparse import HiSparseUse
from quire.sim.tiers import TierUse

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request of a replay. Times are seconds of the virtual clock, None if they do not exist; `refused` says why it
    could never run, "" if it could. `evicted_pages` are those that the cache had evicted when it ended. `explanation`
    is that of its first admission, if the replay explains."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    preemptions: int
    evicted_pages: int
    end: str
    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    refused: str = ""
    explanation: Explanation | None = None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The pool from `time` until the next sample: the shares of its pages that running requests hold, and that are only
    cached; the rest is free. `running` requests run. `ended`: requests had ended, and no step was launched. The pool
    has this part of its greatest `size`, of which the others are shares too."""

    time: float
    held: float
    cached: float
    running: int
    ended: bool = False
    size: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """A replay. `seconds` are virtual ones.

    `prompt_tokens` are those of all requests that could run. `refused_tokens` are those of requests that the pool can
    never hold: they count, and hit nothing. Requests whose client left before they ran count in neither.

    `manager_seconds` is the CPU time inside the scheduler and the cache, `wall_seconds` the real time of the whole
    replay. `most_running` and `mean_running` are the requests that run in a step. `digest` is equal for two replays
    with the same hits, evictions, preemptions and draws, request by request.
    """

    policy: str
    page_size: int
    pool_tokens: int
    records: tuple[RequestRecord, ...]
    prompt_tokens: int
    refused_tokens: int
    hit_tokens: int
    evicted_tokens: int
    preemptions: int
    steps: int
    seconds: float
    manager_seconds: float
    wall_seconds: float
    digest: str
    checked: str
    occupancy: tuple[Occupancy, ...]
    most_running: int
    mean_running: float
    tiers: TierUse | None = None
    """The results of the tiers, if there are any."""
    itl_s: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Percentiles 50, 95 and 99 of the times between two steps that gave a request tokens."""

    chunk_budget: dict[str, Any] | None = None
    """What limited prompts beside decodes (`ChunkBudget.statistics`)."""

    speculation: dict[str, Any] | None = None
    """What was drafted and accepted (`Speculator.statistics`), if anything could be."""

    hisparse: HiSparseUse | None = None
    """The hot buffers, if latents are in host memory."""

    tenants: dict[str, Any] | None = None
    """What each tenant has at the end, by name, and what became of its prompts (`TenantCounters`), if there are any."""

    # What a comparison adds. Rates are shares of `prompt_tokens`.
    trace: str = ""
    model: str = ""
    arena: bool = False
    pool_note: str = ""
    """Why the pool has another size than requested, or no arena, if so."""
    working_set_tokens: int = 0
    ideal_hit_rate: float = 0.0
    optimal_hit_rate: float = 0.0
    gap_closed: float | None = None
    """The closed part of the gap between LRU and the optimum; None if LRU was not replayed or is optimal."""

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found cached."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def place(self) -> tuple[str, int, int]:
        """Model, page size and pool: policies, tiers and hisparse are compared where these are equal."""
        return self.model, self.page_size, self.pool_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens drawn for requests, those of aborted ones among them."""
        return sum(record.output_tokens for record in self.records)

    @property
    def output_rate(self) -> float:
        """Output tokens for each virtual second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_first_token_seconds(self) -> float:
        """The mean time from a request's arrival to its first token; zero if there was none."""
        found = first_token_times(self.records)
        return float(found.mean()) if len(found) else 0.0

    def first_token_seconds(self, shares: Sequence[float] = PERCENTILES) -> tuple[float, ...]:
        """Percentiles of the same; zeros if there was none."""
        return percentiles(first_token_times(self.records), shares)

    def count(self, end: str) -> int:
        """Requests by how they ended: "length", "abort" or "refused"."""
        return sum(record.end == end for record in self.records)

    def tokens_by_cause(self) -> dict[str, int]:
        """Prompt tokens by cause, if the replay explains; with `refused_tokens` these are all."""
        found = dict.fromkeys(map(str, Cause), 0)
        for record in self.records:
            if record.explanation is not None:
                for reason in record.explanation.reasons:
                    found[reason.cause] += reason.tokens
        return found

    def as_dict(self) -> dict[str, Any]:
        """The output of `quire replay --json` for it."""
        return {name: getattr(self, name) for name in _JSON_FIELDS} | {
            "requests": len(self.records),
            "refused": self.count("refused"),
            "aborted": self.count("abort"),
            **dict(zip(("ttft_p50_s", "ttft_p95_s", "ttft_p99_s"), self.first_token_seconds(), strict=True)),
            **dict(zip(("itl_p50_s", "itl_p95_s", "itl_p99_s"), self.itl_s, strict=True)),
            "ttft_mean_s": self.mean_first_token_seconds,
            "output_tokens_per_s": self.output_rate,
            "virtual_seconds": self.seconds,
            "occupancy": [(sample.time, sample.held, sample.cached) for sample in self.occupancy],
            "sizes": [(sample.time, sample.size) for sample in self.occupancy],
            "tiers": plain(self.tiers),
            "hisparse": plain(self.hisparse),
        }


_JSON_FIELDS = (
    "trace", "model", "policy", "page_size", "pool_tokens", "pool_note", "working_set_tokens", "refused_tokens",
    "prompt_tokens", "output_tokens", "hit_tokens", "hit_rate", "ideal_hit_rate", "optimal_hit_rate", "gap_closed",
    "evicted_tokens", "preemptions", "steps", "most_running", "mean_running", "chunk_budget", "speculation",
    "arena", "tenants", "manager_seconds", "wall_seconds", "checked", "digest",
)  # fmt: skip

_MOST_SAMPLES = 512


def first_token_times(records: Sequence[RequestRecord]) -> npt.NDArray[np.float64]:
    """Seconds from the arrival of each request to its first token."""
    return np.array([each.first_token - each.arrived for each in records if each.first_token is not None])


def percentiles(values: npt.NDArray[np.float64], shares: Sequence[float] = PERCENTILES) -> tuple[float, ...]:
    """Percentiles of these; zeros of nothing."""
    return tuple(map(float, np.percentile(values, shares))) if len(values) else (0.0,) * len(shares)


class OccupancyLog:
    """Samples of one cache: at every n-th step, after it when requests end, and when the last one ends. If there are
    too many, every other step is dropped and n doubles."""

    def __init__(self, cache: KVCache, scheduler: Scheduler) -> None:
        self.samples: list[Occupancy] = []
        self._cache = cache
        self._scheduler = scheduler
        self._every = 1
        self._steps = 0

    def launched(self, now: float) -> None:
        """A step was launched."""
        self._steps += 1
        if self._steps % self._every:
            return
        if len(self.samples) >= _MOST_SAMPLES:
            self._thin()
        self._sample(now, ended=False)

    def ended(self, now: float) -> None:
        """Requests have ended and released their pages."""
        if self._adds(self._scheduler.num_running):
            self._sample(now, ended=True)

    def _adds(self, running: int) -> bool:
        """Whether a sample after an end differs from the last one; their number is bounded by that of the steps."""
        last = self.samples[-1] if self.samples else None
        return last is not None and (not last.ended or (last.running > 0 and running == 0))

    def _thin(self) -> None:
        before, self.samples = self.samples, []
        self._every *= 2
        steps = 0
        for sample in before:
            steps += not sample.ended
            if self._adds(sample.running) if sample.ended else steps % 2:
                self.samples.append(sample)

    def _sample(self, now: float, *, ended: bool) -> None:
        cache = self._cache
        total, cached, size = cache.plan.num_pages, cache.tree.num_evictable, 1.0
        free = [group.num_free for group in cache.groups if group.reach.whole]
        more_ids = cache.pages.num_pages > total or cache.plan.arena is not None
        if any(cache.resizing.released().values()):
            size, more_ids = cache.resizing.num_bytes / cache.plan.pool_bytes, True
        available = cached + (min(free) if more_ids and free else cache.pages.num_free_pages)
        held = max(0, int(total * size) - available) / total
        self.samples.append(Occupancy(now, held, cached / total, self._scheduler.num_running, ended, size))
