"""Comparison: a trace replayed with several policies, pools and page sizes, beside the best possible cache."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from quire.errors import InvalidInput, PlanError
from quire.plan.budget import MemoryPlan, format_bytes
from quire.plan.step_cost import CostModel
from quire.sim.hisparse import SimulatedHiSparse
from quire.sim.hit_bounds import HitBounds
from quire.sim.pools import PLAIN, model_pools, plain_pools
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.replicas import Replicas, ReplicasResult
from quire.sim.result import ReplayResult
from quire.sim.roles import Roles, RolesResult
from quire.sim.settings import Fleet, SimulatedLink, SimulatedTiers
from quire.sim.trace_request import Trace
from quire.spec.hisparse import HiSparseConfig
from quire.spec.model import ModelSpec
from quire.spec.speculation import SpeculativeConfig, get_drafts_beyond_end

_BASELINE = "lru"
_NO_ARENA = "--arena has no effect on {}: it has no two groups, a whole and a partial one, to share one."

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
    holds no request of the trace becomes the smallest pool that holds all of them. Every replay is done on the device
    alone, then with each of `tiers`, then with each of `hisparse`: hot buffers in the same bytes. With `speculation`,
    requests draft as `ReplaySettings.acceptance` says. From some times on pools are a part of what they were, as
    `resizes` say."""

    models: Sequence[SimulatedModel]
    policies: Sequence[str]
    pools: Sequence[int | Fraction]
    page_sizes: Sequence[int]
    max_running: int
    settings: ReplaySettings
    grows: bool = False
    speculation: SpeculativeConfig | None = None
    tiers: Sequence[SimulatedTiers] = ()
    hisparse: Sequence[SimulatedHiSparse] = ()
    arena: bool = False
    resizes: Sequence[tuple[float, Fraction]] = ()


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
                    unused = _NO_ARENA.format(model.name) if grid.arena and not result.arena else ""
                    compared = replace(
                        result,
                        pool_note=" ".join(filter(None, (note, unused))),
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
    model, page_size, tokens, note = _one_pool(trace, grid, progress, num_variants=1 + len(grid.tiers))
    return replace(next(_replays(trace, grid, model, page_size, tokens, progress)), pool_note=note)


def replay_roles(
    trace: Trace, grid: Grid, link: SimulatedLink, num_prefill: int, num_decode: int, progress: ReportProgress
) -> tuple[RolesResult, RolesResult]:
    """The replay of a grid with one combination by engines with roles, and by as many without. Each has the pool. Their
    host memory holds twice as much, unless the grid has tiers. Raises as `replay_one`."""
    model, page_size, tokens, _ = _one_pool(trace, grid, progress, num_variants=1)
    plan = _plan(trace, grid, model, page_size, tokens)
    tiers = next(iter(grid.tiers), SimulatedTiers(host_tokens=2 * tokens))
    tiers = tiers.changed(record_bytes=model.record_bytes(plan))
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


def replay_replicas(
    trace: Trace, grid: Grid, fleet: Fleet, routers: Sequence[str], progress: ReportProgress
) -> list[ReplicasResult]:
    """The replay of a grid with one combination by engines behind each of these routers. Each engine has the pool, and
    the tiers of the grid if there are any. Raises as `replay_one`."""
    model, page_size, tokens, _ = _one_pool(trace, grid, progress, num_variants=1)
    plan = _plan(trace, grid, model, page_size, tokens)
    tiers = next((each.changed(record_bytes=model.record_bytes(plan)) for each in grid.tiers), None)
    settings = replace(grid.settings, policy=grid.policies[0], tiers=tiers)
    found = []
    for router in routers:
        what = f"{fleet.num_replicas} engines, {router}"
        progress(what, 0)
        replicas = Replicas(plan, model.cost(plan), settings, fleet, router, trace, progress=partial(progress, what))
        found.append(replicas.run())
    return found


def _one_pool(
    trace: Trace, grid: Grid, progress: ReportProgress, *, num_variants: int
) -> tuple[SimulatedModel, int, int, str]:
    """Model, page size and pool of a grid with one combination, and why the pool is larger than requested. There are
    `num_variants` replays of each combination."""
    num_replays = num_variants * math.prod(map(len, (grid.models, grid.policies, grid.pools, grid.page_sizes)))
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
    """Results by policy: on the device alone, with tiers, and with latents in host memory."""
    plan = _plan(trace, grid, model, page_size, tokens)
    cost, record_bytes = model.cost(plan), model.record_bytes(plan)
    sparse = [(each, _plan(trace, grid, model, page_size, tokens, each.config)) for each in grid.hisparse]
    planned = partial(_plan, trace, grid, model, page_size)
    sizes = tuple((time, _part_of(plan, part, tokens // page_size, planned)) for time, part in grid.resizes)

    def run(label: str, plan: MemoryPlan, settings: ReplaySettings) -> ReplayResult:
        what = f"{model.name}, {settings.policy}, pages of {page_size}, {label}"
        progress(what, 0)
        result = Replay(plan, cost, settings, progress=partial(progress, what)).run(trace)
        # Plans of windows only have more pages than `tokens`.
        return replace(result, pool_tokens=tokens, trace=trace.name, model=model.name, arena=plan.arena is not None)

    for policy in grid.policies:
        settings = replace(grid.settings, policy=policy, sizes=sizes)
        resident = run(f"{tokens:,} tokens", plan, settings)
        yield resident
        for tiers in grid.tiers:
            below = replace(settings, tiers=tiers.changed(record_bytes=record_bytes))
            yield run(f"{tokens:,} tokens and tiers", plan, below)
        for hisparse, hot in sparse:
            found = run("hot buffers", hot, replace(settings, hisparse=hisparse))
            yield _beside_resident(found, resident, plan.num_tokens)


def _part_of(plan: MemoryPlan, part: Fraction, most: int, planned: Callable[[int], MemoryPlan]) -> MemoryPlan:
    """The plan of the most tokens, of less than `most` pages, whose pools take this part of the bytes of `plan`. Raises
    InvalidInput if there is none."""
    if part == 1:
        return plan

    def size(pages: int) -> int:
        try:
            return planned(pages * plan.page_size).pool_bytes
        except PlanError:  # a window does not fit
            return 0

    found = bisect_right(range(1, most), int(plan.pool_bytes * part), key=size)
    if not found or not size(found):
        least = next((taken for pages in range(1, most) if (taken := size(pages))), plan.pool_bytes)
        raise InvalidInput(
            f"{part} of the pools of {format_bytes(plan.pool_bytes)} holds no page of each group: the smallest pools "
            f"take {format_bytes(least)}.",
            fix=f"give {math.ceil(100 * least / plan.pool_bytes)}/100 or more.",
        )
    return planned(found * plan.page_size).within(plan)


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
    trace: Trace, grid: Grid, model: SimulatedModel, page_size: int, tokens: int, hisparse: HiSparseConfig | None = None
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
        hisparse=hisparse,
        arena=grid.arena,
    )


def _with_gaps(results: Sequence[ReplayResult]) -> Iterator[ReplayResult]:
    """The results with the part of the gap that each closes, if there is a replay of LRU to compare with."""
    baseline: dict[tuple[str, int, int], float] = {}
    for result in results:
        if result.policy == _BASELINE:
            baseline.setdefault(result.place, result.hit_rate)  # the first is on the device alone
    for result in results:
        least = baseline.get(result.place)
        if least is not None and (gap := result.optimal_hit_rate - least) > 0:
            yield replace(result, gap_closed=(result.hit_rate - least) / gap)
        else:
            yield result
