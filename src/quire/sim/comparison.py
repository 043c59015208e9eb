"""Comparison: a trace replayed with several policies, pools and page sizes, beside the best possible cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from quire.errors import InvalidInput
from quire.plan.budget import MemoryPlan
from quire.plan.step_cost import CostModel
from quire.sim.hisparse import SimulatedHiSparse
from quire.sim.hit_bounds import HitBounds
from quire.sim.peers import SimulatedLink
from quire.sim.pools import PLAIN, model_pools, plain_pools
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.result import ReplayResult
from quire.sim.roles import Roles, RolesResult
from quire.sim.tier_settings import SimulatedTiers
from quire.sim.trace_request import Trace
from quire.spec.model import ModelSpec
from quire.spec.speculation import SpeculativeConfig, get_drafts_beyond_end

_BASELINE = "lru"

ReportProgress = Callable[[ReplayResult | str, int], None]
"""Called with a replay that begins, or a complete result, and the number of ended requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """The properties of a model that a replay needs: its groups (`spec` None: one full group), and the costs of its
    steps on given pools."""

    name: str = PLAIN
    spec: ModelSpec | None = None
    cost: Callable[[MemoryPlan], CostModel]
    record_bytes: Callable[[MemoryPlan], tuple[int, ...]] = lambda plan: ()
    """Bytes of a page's frames on lower tiers, by group; empty: those of the plan's layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What to compare. A pool is a number of tokens or a part of the trace's working set. With `grows`, a part that
    holds no request of the trace becomes the smallest pool that holds all of them. With `tiers`, every replay is done
    without them and then with them, and with `hisparse` with all latents on the device and then with hot buffers in the
    same bytes. With `speculation`, requests draft as `ReplaySettings.acceptance` says."""

    models: Sequence[SimulatedModel]
    policies: Sequence[str]
    pools: Sequence[int | Fraction]
    page_sizes: Sequence[int]
    max_running: int
    settings: ReplaySettings
    grows: bool = False
    speculation: SpeculativeConfig | None = None
    tiers: SimulatedTiers | None = None
    hisparse: SimulatedHiSparse | None = None


def compare(trace: Trace, grid: Grid, progress: ReportProgress) -> list[ReplayResult]:
    """Replay the trace once for every combination, by model, page size, pool and policy. Raises the errors of planning
    and replaying."""
    found: list[ReplayResult] = []
    for page_size in grid.page_sizes:
        progress(f"pages of {page_size}: what an ideal cache hits", 0)
        bounds = HitBounds(trace, page_size)
        for pool in grid.pools:
            tokens, note = _pool_tokens(pool, bounds.working_set_tokens, page_size, trace, grid)
            progress(f"pages of {page_size}, {tokens:,} tokens: the optimum", 0)
            optimal = bounds.optimal_hit_tokens(tokens)
            for model in grid.models:
                for result in _replays(trace, grid, model, page_size, tokens, progress):
                    compared = replace(
                        result,
                        pool_note=note,
                        working_set_tokens=bounds.working_set_tokens,
                        ideal_hit_rate=bounds.ideal_hit_rate,
                        optimal_hit_rate=optimal / bounds.prompt_tokens if bounds.prompt_tokens else 0.0,
                    )
                    progress(compared, len(result.records))
                    found.append(compared)
    order = {model.name: at for at, model in enumerate(grid.models)}
    return sorted(_with_gaps(found), key=lambda result: order[result.model])


def replay_one(trace: Trace, grid: Grid, progress: ReportProgress) -> ReplayResult:
    """The replay of a grid with one combination, without bounds. Raises InvalidInput if there are more, and the errors
    of planning and replaying."""
    model, page_size, tokens, note = _one_pool(trace, grid, progress, of_tiers=2)
    return replace(next(_replays(trace, grid, model, page_size, tokens, progress)), pool_note=note)


def replay_roles(
    trace: Trace, grid: Grid, link: SimulatedLink, num_prefill: int, num_decode: int, progress: ReportProgress
) -> tuple[RolesResult, RolesResult]:
    """The replay of a grid with one combination by engines with roles, and by as many without. Each has the pool. Their
    host memory holds twice as much, unless the grid has tiers. Raises as `replay_one`."""
    model, page_size, tokens, _ = _one_pool(trace, grid, progress, of_tiers=1)
    plan = _plan(trace, grid, model, page_size, tokens)
    tiers = (grid.tiers or SimulatedTiers(host_tokens=2 * tokens)).changed(record_bytes=model.record_bytes(plan))
    settings = replace(grid.settings, policy=grid.policies[0], tiers=tiers)

    def result(num_prefill: int, num_decode: int) -> RolesResult:
        what = f"{num_prefill} prefill, {num_decode} decode" if num_prefill else f"{num_decode} without roles"
        progress(what, 0)
        roles = Roles(
            plan, model.cost(plan), settings, link, num_prefill=num_prefill, num_decode=num_decode,
            progress=partial(progress, what),
        )  # fmt: skip
        return roles.run(trace)

    return result(num_prefill, num_decode), result(0, num_prefill + num_decode)


def _one_pool(
    trace: Trace, grid: Grid, progress: ReportProgress, *, of_tiers: int
) -> tuple[SimulatedModel, int, int, str]:
    """Model, page size and pool of a grid with one combination, and why the pool is larger than requested. A grid with
    tiers has `of_tiers` replays for each."""
    num_replays = math.prod(map(len, (grid.models, grid.policies, grid.pools, grid.page_sizes)))
    num_replays *= 1 if grid.tiers is None else of_tiers
    if num_replays != 1:
        raise InvalidInput(
            f"these are {num_replays} replays, and one is wanted.",
            fix="give one policy, one pool size, one page size and one model.",
        )
    (page_size,), (pool,), (model,) = grid.page_sizes, grid.pools, grid.models
    working_set = 0
    if isinstance(pool, Fraction):
        progress(f"pages of {page_size}: the working set", 0)
        working_set = HitBounds(trace, page_size).working_set_tokens
    return model, page_size, *_pool_tokens(pool, working_set, page_size, trace, grid)


def _pool_tokens(
    pool: int | Fraction, working_set_tokens: int, page_size: int, trace: Trace, grid: Grid
) -> tuple[int, str]:
    """A pool in tokens: whole pages, at least one. Also why it is larger than requested, if it is."""
    tokens = int(working_set_tokens * pool) if isinstance(pool, Fraction) else pool
    tokens = max(page_size, tokens - tokens % page_size)
    reserved = get_drafts_beyond_end(grid.speculation, page_size)
    written = [prompt + max(1, output) - 1 + reserved for prompt, output in trace.lengths]  # all but the last token
    if not grid.grows or not isinstance(pool, Fraction) or min(written) <= tokens:
        return tokens, ""
    larger = -(-max(written) // page_size) * page_size
    return larger, (
        f"{pool} of the working set is {tokens:,} tokens, which hold no request of the trace; the pool is the smallest "
        f"that holds the longest request, {larger:,} tokens."
    )


def _replays(
    trace: Trace, grid: Grid, model: SimulatedModel, page_size: int, tokens: int, progress: ReportProgress
) -> Iterator[ReplayResult]:
    """Results by policy, without tiers and with them, or with all latents on the device and then in host memory."""
    plan = _plan(trace, grid, model, page_size, tokens)
    hot = _plan(trace, grid, model, page_size, tokens, hot=True) if grid.hisparse is not None else None
    cost = model.cost(plan)
    variants: list[SimulatedTiers | None] = [None]
    if grid.tiers is not None:
        variants.append(grid.tiers.changed(record_bytes=model.record_bytes(plan)))
    for policy in grid.policies:
        for tiers in variants:
            what = f"{model.name}, {policy}, pages of {page_size}, {tokens:,} tokens"
            what += " and tiers" if tiers is not None else ""
            progress(what, 0)
            settings = replace(grid.settings, policy=policy, tiers=tiers)
            result = Replay(plan, cost, settings, progress=partial(progress, what)).run(trace)
            # Plans of windows only have more pages than `tokens`.
            result = replace(result, pool_tokens=tokens, trace=trace.name, model=model.name)
            yield result
        if hot is not None:
            what = f"{model.name}, {policy}, pages of {page_size}, hot buffers"
            progress(what, 0)
            settings = replace(grid.settings, policy=policy, hisparse=grid.hisparse)
            found = Replay(hot, cost, settings, progress=partial(progress, what)).run(trace)
            found = replace(found, pool_tokens=tokens, trace=trace.name, model=model.name)
            yield _beside_resident(found, result, plan.num_tokens)


def _beside_resident(found: ReplayResult, resident: ReplayResult, resident_tokens: int) -> ReplayResult:
    """A replay with hot buffers, with the numbers of one without, and why it loses."""
    use = found.hisparse
    assert use is not None
    loses = ""
    if use.tokens < resident_tokens:
        loses = f"{use.tokens:,} tokens fit, and {resident_tokens:,} with all latents on the device"
    elif found.output_rate < resident.output_rate:
        loses = (
            f"{found.output_rate:,.1f} output tokens a second, and {resident.output_rate:,.1f} with all latents on the "
            "device"
        )
    use = replace(
        use,
        resident_tokens=resident_tokens,
        resident_most_running=resident.most_running,
        resident_mean_running=resident.mean_running,
        loses=loses,
    )
    return replace(found, hisparse=use)


def _plan(
    trace: Trace, grid: Grid, model: SimulatedModel, page_size: int, tokens: int, *, hot: bool = False
) -> MemoryPlan:
    lengths = [prompt + max(1, output) for prompt, output in trace.lengths]
    running, chunk, drafts = grid.max_running, grid.settings.chunk, grid.speculation
    if model.spec is None:
        return plain_pools(tokens, page_size, context=max(lengths), max_running=running, speculation=drafts)
    return model_pools(
        model.spec,
        tokens,
        page_size,
        lengths=lengths,
        max_running=running,
        chunk=chunk,
        speculation=drafts,
        hisparse=grid.hisparse.config if hot and grid.hisparse is not None else None,
    )


def _with_gaps(results: Sequence[ReplayResult]) -> Iterator[ReplayResult]:
    """The results with the part of the gap that each closes, if there is a replay of LRU to compare with."""
    baseline = {
        each.place: each.hit_rate for each in results if each.policy == _BASELINE and not (each.tiers or each.hisparse)
    }
    for result in results:
        least = baseline.get(result.place)
        if least is not None and (gap := result.optimal_hit_rate - least) > 0:
            yield replace(result, gap_closed=(result.hit_rate - least) / gap)
        else:
            yield result
