"""Comparison: a trace replayed under several policies, pool and page sizes, beside what the best cache could hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from quire.errors import InvalidInput
from quire.plan.budget import MemoryPlan
from quire.sim.clock import CostModel
from quire.sim.ideal import ideal_hits, optimal_hit_tokens
from quire.sim.page_runs import PageRuns
from quire.sim.pools import PLAIN, PoolRequest, model_pools, plain_pools
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.result import ReplayResult
from quire.sim.tiers import SimulatedTiers
from quire.sim.trace_request import Trace
from quire.spec.model import ModelSpec

_BASELINE = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A model as far as a replay needs it: its groups (`spec` None: one that reads everything), and what its steps cost
    on given pools."""

    name: str = PLAIN
    spec: ModelSpec | None = None
    cost: Callable[[MemoryPlan], CostModel]
    record_bytes: Callable[[MemoryPlan], tuple[int, ...]] = lambda plan: ()
    """Of a page's frames below the device, by group; none: what the plan's layouts take."""

    def pools(self, pool_tokens: int, page_size: int, wanted: PoolRequest) -> MemoryPlan:
        """Pools for that many tokens. Raises what the planner raises."""
        if self.spec is None:
            return plain_pools(pool_tokens, page_size, wanted)
        return model_pools(self.spec, pool_tokens, page_size, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What to compare. A pool is a number of tokens or a part of the trace's working set; with `grows`, a part that
    holds no request of the trace becomes the smallest pool that holds all of them. With `tiers`, every replay is done
    without them and then with them."""

    models: Sequence[SimulatedModel]
    policies: Sequence[str]
    pools: Sequence[int | Fraction]
    page_sizes: Sequence[int]
    max_running: int
    settings: ReplaySettings
    grows: bool = False
    tiers: SimulatedTiers | None = None

    @property
    def num_runs(self) -> int:
        """Replays in all."""
        below = 1 if self.tiers is None else 2
        return len(self.models) * len(self.policies) * len(self.pools) * len(self.page_sizes) * below


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One replay beside the bounds of its page size and pool. Rates are shares of the prompt tokens of all requests
    that could run, those that the pool refuses among them. `gap_closed` is the part of the way from LRU's hits to the
    optimum's, None where LRU was not replayed or leaves nothing to win."""

    model: str
    trace: str
    result: ReplayResult
    working_set_tokens: int
    ideal_hit_rate: float
    optimal_hit_rate: float
    gap_closed: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """What `quire replay --json` prints of it."""
        result = self.result
        first, later, late = result.first_token_seconds((50, 95, 99))
        return {
            "trace": self.trace,
            "model": self.model,
            "policy": result.policy,
            "page_size": result.page_size,
            "pool_tokens": result.pool_tokens,
            "pool_note": result.pool_note,
            "working_set_tokens": self.working_set_tokens,
            "requests": len(result.records),
            "refused": result.count("refused"),
            "refused_tokens": result.refused_tokens,
            "aborted": result.count("abort"),
            "prompt_tokens": result.prompt_tokens,
            "output_tokens": result.output_tokens,
            "hit_tokens": result.hit_tokens,
            "hit_rate": result.hit_rate,
            "ideal_hit_rate": self.ideal_hit_rate,
            "optimal_hit_rate": self.optimal_hit_rate,
            "gap_closed": self.gap_closed,
            "evicted_tokens": result.evicted_tokens,
            "preemptions": result.preemptions,
            "ttft_p50_s": first,
            "ttft_p95_s": later,
            "ttft_p99_s": late,
            "ttft_mean_s": result.mean_first_token_seconds,
            "output_tokens_per_s": result.output_rate,
            "virtual_seconds": result.seconds,
            "steps": result.steps,
            "manager_seconds": result.manager_seconds,
            "wall_seconds": result.wall_seconds,
            "checked": result.checked,
            "digest": result.digest,
            "tiers": asdict(result.tiers) if result.tiers is not None else None,
        }

    def requests(self) -> list[dict[str, Any]]:
        """A dictionary for each request, in the order of their ends."""
        return [asdict(record) for record in self.result.records]


def compare(trace: Trace, grid: Grid, progress: Callable[[Run | str, int], None]) -> list[Run]:
    """Replay the trace once for every combination, by model, page size, pool and policy.

    `progress` is told, with the number of requests that have ended in this run, what is going on (a line of text), and
    each run when it is over. Raises what planning and replaying raise.
    """
    found: list[Run] = []
    for page_size in grid.page_sizes:
        progress(f"pages of {page_size}: what an ideal cache hits", 0)
        runs = PageRuns(trace, page_size)
        ideal = ideal_hits(runs, page_size)
        for pool in grid.pools:
            tokens, note = _pool_tokens(pool, ideal.working_set_tokens, page_size, trace, grid)
            progress(f"pages of {page_size}, {tokens:,} tokens: the optimum", 0)
            optimal = optimal_hit_tokens(runs, page_size, tokens)
            for model in grid.models:
                for result in _replays(trace, grid, model, page_size, tokens, progress):
                    run = Run(
                        model=model.name,
                        trace=trace.name,
                        result=replace(result, pool_note=note),
                        working_set_tokens=ideal.working_set_tokens,
                        ideal_hit_rate=ideal.hit_rate,
                        optimal_hit_rate=optimal / ideal.prompt_tokens if ideal.prompt_tokens else 0.0,
                    )
                    progress(run, len(result.records))
                    found.append(run)
    order = {model.name: at for at, model in enumerate(grid.models)}
    return sorted(_with_gaps(found), key=lambda run: order[run.model])


def replay_one(trace: Trace, grid: Grid, progress: Callable[[Run | str, int], None]) -> ReplayResult:
    """The replay of a grid with one combination, without bounds. Raises InvalidInput where there are more, and what
    planning and replaying raise."""
    if grid.num_runs != 1:
        raise InvalidInput(
            f"these are {grid.num_runs} replays, and one is wanted.",
            fix="give one policy, one pool size, one page size and one model.",
        )
    (page_size,), (pool,), (model,) = grid.page_sizes, grid.pools, grid.models
    working_set = 0
    if isinstance(pool, Fraction):
        progress(f"pages of {page_size}: the working set", 0)
        working_set = ideal_hits(trace, page_size).working_set_tokens
    tokens, note = _pool_tokens(pool, working_set, page_size, trace, grid)
    return replace(next(_replays(trace, grid, model, page_size, tokens, progress)), pool_note=note)


def _pool_tokens(
    pool: int | Fraction, working_set_tokens: int, page_size: int, trace: Trace, grid: Grid
) -> tuple[int, str]:
    """A pool in tokens: whole pages, at least one. And why it is larger than it would be, where it is."""
    tokens = int(working_set_tokens * pool) if isinstance(pool, Fraction) else pool
    tokens = max(page_size, tokens - tokens % page_size)
    written = [prompt + max(1, output) - 1 for prompt, output in trace.lengths]  # the last token is never written
    if not grid.grows or not isinstance(pool, Fraction) or min(written) <= tokens:
        return tokens, ""
    larger = -(-max(written) // page_size) * page_size
    return larger, (
        f"{pool} of the working set is {tokens:,} tokens, which hold no request of the trace; the pool is the smallest "
        f"that holds the longest request, {larger:,} tokens."
    )


def _replays(
    trace: Trace,
    grid: Grid,
    model: SimulatedModel,
    page_size: int,
    tokens: int,
    progress: Callable[[Run | str, int], None],
) -> Iterator[ReplayResult]:
    lengths = [prompt + max(1, output) for prompt, output in trace.lengths]
    wanted = PoolRequest(lengths=lengths, max_running=grid.max_running, chunk=grid.settings.chunk)
    plan = model.pools(tokens, page_size, wanted)
    cost = model.cost(plan)
    below = [None] if grid.tiers is None else [None, replace(grid.tiers, record_bytes=model.record_bytes(plan))]
    for policy in grid.policies:
        for tiers in below:
            what = f"{model.name}, {policy}, pages of {page_size}, {tokens:,} tokens"
            what += " and tiers" if tiers is not None else ""
            progress(what, 0)
            settings = replace(grid.settings, policy=policy, tiers=tiers)
            result = Replay(plan, cost, settings, progress=partial(progress, what)).run(trace)
            yield replace(result, pool_tokens=tokens)  # plans of windows only have more pages than that


def _with_gaps(runs: Sequence[Run]) -> list[Run]:
    """The runs with the part of the gap that each closes, where there is an LRU run to compare with."""

    def place(run: Run) -> tuple[str, int, int]:
        return run.model, run.result.page_size, run.result.pool_tokens

    plain = [run for run in runs if run.result.policy == _BASELINE and run.result.tiers is None]
    baseline = {place(run): run.result.hit_rate for run in plain}
    found = []
    for run in runs:
        least = baseline.get(place(run))
        gap = None if least is None else run.optimal_hit_rate - least
        closed = (run.result.hit_rate - least) / gap if least is not None and gap and gap > 0 else None
        found.append(replace(run, gap_closed=closed))
    return found
