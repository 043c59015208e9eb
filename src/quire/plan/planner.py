"""`make_plan`: from a model's spec and settings to the plan of a server."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from quire.errors import InvalidInput, PlanError
from quire.plan.budget import format_bytes
from quire.plan.configurator import (
    MemoryPoolConfig,
    MemoryPoolConfigurator,
    PoolOptions,
    create_memory_pool_configurator,
)
from quire.plan.devices import Line, working_memory
from quire.plan.mix import Mix, uniform
from quire.plan.plan import Plan, PlanSettings
from quire.plan.report import ledger_of, notes_of
from quire.spec.families import draft_like
from quire.spec.group import GroupSpec
from quire.spec.kv_format import KVFormat, kv_format
from quire.spec.model import ModelSpec
from quire.spec.speculation import SpeculativeConfig
from quire.spec.weights import WeightEstimate

_DEFAULT_PAGE = 16
_DEFAULT_LENGTH = 8192  # tokens of an expected request, by default
_ROUNDS = 8  # of graphs for fewer requests; a few are enough
_NO_LIMIT = 2**62  # tokens of a stage that has only states


def make_plan(spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None = None) -> Plan:
    """The plan of a server: the memory of each pool, and how many tokens and requests fit.

    Every pipeline stage is solved. The tokens are those of the stage with the least room; all stages get pools for that
    many, and the rank of that stage is shown. If fewer requests fit than requested, the plan is that of the most that
    do. Raises PlanError if the pools cannot hold one page, or a request its window or state; InvalidInput if settings
    contradict each other or do not fit the model.
    """

    def holds(concurrency: int) -> bool:
        try:
            found = _plan(spec, settings, weights, concurrency)
        except PlanError:
            return False
        return found.requests_at(found.context) >= concurrency

    asked = settings.concurrency
    if asked is None:
        return _with_graphs_for_those_that_fit(spec, settings, weights, _plan(spec, settings, weights, None))
    most = asked if holds(asked) else bisect_left(range(1, asked), True, key=lambda number: not holds(number))
    return _plan(spec, settings, weights, most or None)


def _with_graphs_for_those_that_fit(
    spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None, plan: Plan
) -> Plan:
    """The plan again, with graphs captured for as many requests as it holds: fewer graphs make room for more pages."""
    for _ in range(_ROUNDS):
        batch = max(1, plan.requests_at(plan.context))
        if batch >= plan.settings.largest_graph:
            break
        plan = _plan(spec, replace(settings, graph_batch=batch), weights, None)
    return replace(plan, settings=settings)


def _plan(spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None, concurrency: int | None) -> Plan:
    parallel = settings.parallel
    parallel.check(spec)
    context = _context(spec, settings)
    spec, num_drafts = _with_drafts(spec, settings.speculation)
    page_size = settings.page_size or spec.page_size(_DEFAULT_PAGE)
    mix = (settings.mix or _default_mix(settings, context)).clipped(context)
    kept = kv_format(settings.kv_dtype, spec.dtype)
    groups_at = partial(_groups, spec, kept, parallel.attention_tp, settings.window_pool)
    whole = groups_at((0, len(spec.layers)), num_drafts, page_size)
    if not whole:
        raise InvalidInput(f"no layer of {spec.architecture} keeps anything.", fix="no cache is needed.")
    options = PoolOptions(
        mix=mix,
        chunk=settings.chunk,
        shares=settings.shares,
        token_ranks=parallel.dcp,
        windows_only=not any(group.reach.kind == "full" for group in whole)
        and any(group.reach.kind in ("window", "chunk") for group in whole),
        speculation=settings.speculation,
        max_running_requests=None if concurrency is None else -(-concurrency // parallel.dp),
        swa_full_tokens_ratio=settings.swa_full_tokens_ratio,
        mamba_full_memory_ratio=settings.mamba_full_memory_ratio,
        max_mamba_cache_size=settings.max_mamba_cache_size,
    )
    solved = _solve_stages(spec, settings, weights, options, page_size, num_drafts, groups_at)
    best = min(solved, key=lambda one: one.config.max_total_num_tokens)
    tokens = best.config.max_total_num_tokens
    if settings.max_total_tokens is not None:
        tokens = min(tokens, settings.max_total_tokens)
    if tokens < best.config.max_total_num_tokens or len(solved) > 1:
        solved = [one.at(tokens, page_size) for one in solved]
        best = next(one for one in solved if one.stage == best.stage)
    plan = Plan(
        spec=spec,
        settings=settings,
        page_size=page_size,
        context=context,
        mix=mix,
        config=best.config,
        kv_bytes=best.kv_bytes,
        stage=best.stage,
        stages=tuple(one.config for one in solved),
        configurator=best.configurator,
    )
    return replace(plan, ledger=ledger_of(plan, best.lines), notes=notes_of(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """One pipeline stage."""

    stage: int
    config: MemoryPoolConfig
    configurator: MemoryPoolConfigurator
    kv_bytes: int
    lines: tuple[Line, ...]

    def at(self, tokens: int, page_size: int) -> _Solved:
        """The same stage with pools for that many tokens."""
        solve = self.configurator.calculate_pool_sizes_from_max_tokens
        return replace(self, config=solve(tokens, page_size, available_bytes=self.kv_bytes))


def _solve_stages(
    spec: ModelSpec,
    settings: PlanSettings,
    weights: WeightEstimate | None,
    options: PoolOptions,
    page_size: int,
    num_drafts: int,
    groups_at: Callable[..., tuple[GroupSpec, ...]],
) -> list[_Solved]:
    """Every stage that has a pool. Stages of states alone come last: they limit requests, and tokens least."""
    found: list[_Solved] = []
    stages = settings.parallel.stages(len(spec.layers))
    for index, stage in enumerate(stages):
        drafts = num_drafts if index == len(stages) - 1 else 0
        stage_groups = partial(groups_at, (stage.start, stage.stop), drafts)
        if not stage_groups(page_size):
            continue
        lines = _device_lines(settings, stage, weights, drafts > 0, spec.hidden_size)
        kv_bytes = _kv_bytes(settings, lines)
        configurator = create_memory_pool_configurator(stage_groups, options, page_size=page_size)
        config = configurator.calculate_pool_sizes(kv_bytes, page_size)
        if len(stages) > 1 and not configurator.limits_tokens(page_size):
            config = replace(config, max_total_num_tokens=_NO_LIMIT)
        found.append(_Solved(stage=index, config=config, configurator=configurator, kv_bytes=kv_bytes, lines=lines))
    return found


@lru_cache(maxsize=512)
def _groups(
    spec: ModelSpec, kept: KVFormat, tp: int, window_pool: bool, stage: tuple[int, int], drafts: int, page_size: int
) -> tuple[GroupSpec, ...]:
    """Groups of a stage; cached, since advice and sweeps request the same ones repeatedly."""
    return spec.groups(page_size, kept, tp=tp, stage=slice(*stage), num_drafts=drafts, window_pool=window_pool)


def _context(spec: ModelSpec, settings: PlanSettings) -> int:
    if settings.context is not None and settings.context > spec.context_length:
        raise InvalidInput(
            f"a context of {settings.context:,} tokens is beyond the model's {spec.context_length:,}.",
            fix=f"set it to at most {spec.context_length:,}.",
        )
    if settings.context is None and settings.mix is not None:
        return min(spec.context_length, settings.mix.counts[-1][0])
    return settings.context or spec.context_length


def _with_drafts(spec: ModelSpec, speculation: SpeculativeConfig | None) -> tuple[ModelSpec, int]:
    """The spec with draft layers if speculation has any: the model's own, else some like its attention."""
    if speculation is None:
        return spec, 0
    if speculation.num_layers and not spec.drafts:
        spec = replace(spec, drafts=(draft_like(spec.layers),))
    return spec.with_rollback(), speculation.num_layers


def _default_mix(settings: PlanSettings, context: int) -> Mix:
    if settings.context is not None:
        return uniform(context, f"requests of {context:,} tokens")
    length = min(context, _DEFAULT_LENGTH)
    return uniform(length, f"requests of {length:,} tokens")


def _device_lines(
    settings: PlanSettings, stage: slice, weights: WeightEstimate | None, draft: bool, hidden_size: int
) -> tuple[Line, ...]:
    """The lines of the ledger that are not pools. Empty without a device."""
    device, parallel = settings.device, settings.parallel
    if device is None:
        return ()
    if settings.measured is not None:
        return settings.measured
    if settings.weight_bytes is not None:
        line = Line(name="weights", bytes=settings.weight_bytes, why="as given, per rank")
    elif weights is not None:
        layers = range(stage.start, stage.stop)
        size = weights.bytes_on_rank(parallel.tp, layers, draft=draft, attention_tp=parallel.attention_tp)
        why = f"{weights.num_parameters / 1e9:,.2f} billion parameters, this rank's share"
        line = Line(name="weights", bytes=size, why=why, estimated=True)
    else:
        raise PlanError("the weights cannot be estimated.", fix="give their bytes on one rank with --weights 38GiB.")
    if settings.mem_fraction_static is not None:
        rest = device.memory - int(device.memory * settings.mem_fraction_static)
        why = f"what --mem-fraction-static {settings.mem_fraction_static:g} leaves of {format_bytes(device.memory)}"
        return (line, Line(name="rest", bytes=rest, why=f"activations, graphs and reserve: {why}"))
    working = working_memory(
        chunk=settings.chunk,
        hidden_size=hidden_size,
        graph_batch=settings.largest_graph,
        ranks=parallel.tp * parallel.pp,
        device=device,
    )
    return (line, *working)


def _kv_bytes(settings: PlanSettings, lines: Sequence[Line]) -> int:
    """The budget of the pools of a rank. Raises PlanError if nothing is left for them."""
    taken = sum(line.bytes for line in lines)
    device = settings.device
    if settings.kv_memory is None and device is None:
        raise InvalidInput(
            "a plan needs bytes to split.", fix="give --kv-memory 40GiB, or --gpu h100-80gb, or --device-memory 80GiB."
        )
    wanted = settings.kv_memory or 0
    if device is not None and taken + wanted >= device.memory:
        parts = ", ".join(f"{line.name} {format_bytes(line.bytes)}" for line in lines)
        pools = f", pools {format_bytes(wanted)}" if wanted else ""
        raise PlanError(
            f"{device.name} has {format_bytes(device.memory)}, and {parts}{pools} take "
            f"{format_bytes(taken + wanted)} of it" + ("." if wanted else ", which leaves nothing for pools."),
            fix=_more_room(settings, bool(wanted)),
        )
    if settings.kv_memory is not None:
        return settings.kv_memory
    return device.memory - taken if device is not None else 0


def _more_room(settings: PlanSettings, wanted: bool) -> str:
    """Changes that give pools more of the device."""
    if settings.mem_fraction_static is not None:
        return "raise --mem-fraction-static, split the model over more ranks (--tp, --pp), or use a larger device."
    rest = ", or ask for less KV memory." if wanted else "."
    return "split the model over more ranks (--tp, --pp), use smaller weights or a larger device" + rest
