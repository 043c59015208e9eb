"""`make_plan`: from a model's spec and settings to the plan of a server."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from quire.errors import InvalidInput, PlanError
from quire.plan.advice import more_room
from quire.plan.budget import counted, format_bytes
from quire.plan.configurator import (
    CompressedPoolConfigurator,
    DefaultPoolConfigurator,
    GroupsAt,
    HybridSWAPoolConfigurator,
    MemoryPoolConfig,
    MemoryPoolConfigurator,
    NoRoom,
    RecurrentPoolConfigurator,
)
from quire.plan.devices import MOVE_BYTES, Line, working_memory
from quire.plan.hisparse import hot_buffers, selecting
from quire.plan.hisparse_pools import HiSparsePoolConfigurator
from quire.plan.mix import Mix, uniform
from quire.plan.plan import Plan, in_arena
from quire.plan.report import ledger_of, notes_of
from quire.plan.settings import PlanSettings
from quire.plan.speculation import draft_weight_lines, feature_lines, with_draft_layers
from quire.spec.group import GroupSpec
from quire.spec.hisparse import HotBuffers
from quire.spec.kv_format import KVFormat, kv_format
from quire.spec.model import ModelSpec
from quire.spec.weights import WeightEstimate

_DEFAULT_PAGE = 16
_DEFAULT_LENGTH = 8192  # tokens of an expected request, by default
_NO_LIMIT = 2**62  # tokens of a stage that has only states


def make_plan(spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None = None) -> Plan:
    """The plan of a server: the memory of each pool, and how many tokens and requests fit.

    Every pipeline stage is solved. The tokens are those of the stage with the least room; all stages get pools for that
    many, and the rank of that stage is shown. If fewer requests fit than requested, the plan is that of the most that
    do. Raises PlanError if the pools cannot hold one page, or a request its window or state; InvalidInput if settings
    contradict each other or do not fit the model.
    """
    try:
        return _make_plan(spec, settings, weights)
    except NoRoom as error:
        if error.fix and settings.kv_memory is not None:
            raise
        fix = more_room(settings, lambda changed: _make_plan(spec, changed, weights), error.left)
        if settings.max_model_len is None and settings.mix is None:
            fix += f" That is for a context of {spec.context_length:,} tokens: a smaller --max-model-len may need less."
        raise PlanError(error.message, fix=fix) from None


def _make_plan(spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None) -> Plan:
    def holds(concurrency: int) -> bool:
        try:
            found = _plan(spec, settings, weights, concurrency)
        except PlanError:
            return False
        return found.requests_at(found.context) >= concurrency

    asked = settings.concurrency
    if asked is None:
        return _with_graphs_for_those_that_fit(spec, settings, weights)
    most = asked if holds(asked) else bisect_left(range(1, asked), True, key=lambda number: not holds(number))
    return _plan(spec, settings, weights, most or None)


def _with_graphs_for_those_that_fit(spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None) -> Plan:
    """The plan with graphs for as many expected requests as it holds: fewer graphs make room for more pages."""
    plan, batch = _plan(spec, settings, weights, None), settings.largest_graph
    length = min(plan.mix.mean, plan.context)
    for _ in range(2):  # the second has graphs for what the first holds, so it holds no more than that
        fitting = max(1, min(settings.largest_graph, plan.requests_at(length)))
        if fitting != batch:
            plan, batch = _plan(spec, settings.changed(graph_batch=fitting), weights, None), fitting
    notes = plan.notes
    if batch < settings.largest_graph and any(line.name == "graphs" for line in plan.ledger):
        notes += (f"graphs are for {counted(batch, 'request')}: as many of {length:,} tokens as fit.",)
    return replace(plan, settings=settings, notes=notes)


def _plan(spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None, concurrency: int | None) -> Plan:
    settings.parallel.check(spec)
    context = _context(spec, settings)
    spec, num_drafts = with_draft_layers(selecting(spec, settings), settings.speculative_config)
    mix = (settings.mix or _default_mix(settings, context)).clipped(context)
    page_size = settings.page_size or spec.page_size(_DEFAULT_PAGE)
    hot = hot_buffers(spec, settings, page_size=page_size, context=context)
    server = _Server(spec, settings, weights, num_drafts, page_size, hot)
    solved = server.solve_stages(server.options(mix, concurrency))
    best = min(solved, key=lambda one: one.config.max_total_num_tokens)
    tokens = best.config.max_total_num_tokens
    if settings.max_total_tokens is not None:
        tokens = min(tokens, settings.max_total_tokens)
    if tokens < best.config.max_total_num_tokens or len(solved) > 1:
        solved = [one.at(tokens, server.page_size) for one in solved]
        best = next(one for one in solved if one.stage == best.stage)
    plan = Plan(
        spec=spec,
        settings=settings,
        page_size=server.page_size,
        context=context,
        mix=mix,
        config=best.config,
        kv_bytes=best.kv_bytes,
        stage=best.stage,
        stages=tuple(one.config for one in solved),
        configurator=best.configurator,
    )
    return replace(plan, ledger=ledger_of(plan, best.lines), notes=notes_of(plan, weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """One pipeline stage."""

    stage: int
    config: MemoryPoolConfig
    configurator: MemoryPoolConfigurator
    kv_bytes: int
    lines: tuple[Line, ...]

    def at(self, tokens: int, page_size: int) -> _Solved:
        """This stage with pools for that many tokens."""
        solve = self.configurator.calculate_pool_sizes_from_max_tokens
        return replace(self, config=solve(tokens, page_size, available_bytes=self.kv_bytes))


@dataclass(frozen=True, slots=True)
class _Server:
    """What all stages of a plan share."""

    spec: ModelSpec
    settings: PlanSettings
    weights: WeightEstimate | None
    num_drafts: int
    page_size: int
    hot: HotBuffers | None

    def groups_at(self, stage: slice, num_drafts: int, page_size: int) -> tuple[GroupSpec, ...]:
        """The groups of one rank of a stage."""
        kept, settings = kv_format(self.settings.kv_dtype, self.spec.dtype), self.settings
        tp, layers = settings.parallel.attention_tp, (stage.start, stage.stop)
        return _groups(self.spec, kept, tp, settings.window_pool, layers, num_drafts, page_size)

    def options(self, mix: Mix, concurrency: int | None) -> PlanSettings:
        """The options of every stage's configurator."""
        settings = self.settings
        whole = self.groups_at(slice(0, len(self.spec.layers)), self.num_drafts, self.page_size)
        if not whole:
            raise InvalidInput(f"no layer of {self.spec.architecture} keeps anything.", fix="no cache is needed.")
        kinds = {group.reach.kind for group in whole}
        windows_only = "full" not in kinds and bool(kinds & {"window", "chunk"})
        return settings.changed(mix=mix, hot=self.hot, windows_only=windows_only, concurrency=concurrency)

    def solve_stages(self, options: PlanSettings) -> list[_Solved]:
        """Every stage that has a pool. Stages of states alone limit requests, not tokens."""
        found: list[_Solved] = []
        stages = self.settings.parallel.stages(len(self.spec.layers))
        for index, stage in enumerate(stages):
            is_last = index == len(stages) - 1
            drafts = self.num_drafts * is_last
            stage_groups = partial(self.groups_at, stage, drafts)
            if not stage_groups(self.page_size):
                continue
            lines = _device_lines(self.settings, stage, self.weights, drafts > 0, self.spec)
            lines += feature_lines(self.settings, self.spec, self.page_size) if is_last else ()
            lines += move_lines(self.settings, stage_groups(self.page_size)) if len(stages) == 1 else ()
            kv_bytes = _kv_bytes(self.settings, lines)
            configurator = create_memory_pool_configurator(stage_groups, options, page_size=self.page_size)
            config = configurator.calculate_pool_sizes(kv_bytes, self.page_size)
            if len(stages) > 1 and not configurator.limits_tokens(self.page_size):
                config = replace(config, max_total_num_tokens=_NO_LIMIT)
            found.append(_Solved(stage=index, config=config, configurator=configurator, kv_bytes=kv_bytes, lines=lines))
        return found


_CONFIGURATORS: tuple[type[MemoryPoolConfigurator], ...] = (
    HiSparsePoolConfigurator,
    RecurrentPoolConfigurator,
    CompressedPoolConfigurator,
    HybridSWAPoolConfigurator,
    DefaultPoolConfigurator,
)


def create_memory_pool_configurator(
    groups_at: GroupsAt, options: PlanSettings, *, page_size: int
) -> MemoryPoolConfigurator:
    """The first configurator that suits the groups. Raises what `groups_at` raises for the page size."""
    groups = groups_at(page_size)
    return next(kind for kind in _CONFIGURATORS if kind.suits(groups, options))(groups_at, options)


@lru_cache(maxsize=512)
def _groups(
    spec: ModelSpec, kept: KVFormat, tp: int, window_pool: bool, stage: tuple[int, int], drafts: int, page_size: int
) -> tuple[GroupSpec, ...]:
    """Groups of a stage; cached, since advice and sweeps request the same ones repeatedly."""
    return spec.groups(page_size, kept, tp=tp, stage=slice(*stage), num_drafts=drafts, window_pool=window_pool)


def _context(spec: ModelSpec, settings: PlanSettings) -> int:
    if settings.max_model_len is not None and settings.max_model_len > spec.context_length:
        raise InvalidInput(
            f"a context of {settings.max_model_len:,} tokens is beyond the model's {spec.context_length:,}.",
            fix=f"set it to at most {spec.context_length:,}.",
        )
    if settings.max_model_len is None and settings.mix is not None:
        return min(spec.context_length, settings.mix.counts[-1][0])
    return settings.max_model_len or spec.context_length


def _default_mix(settings: PlanSettings, context: int) -> Mix:
    if settings.max_model_len is not None:
        return uniform(context, f"requests of {context:,} tokens")
    length = min(context, _DEFAULT_LENGTH)
    return uniform(length, f"requests of {length:,} tokens")


def _device_lines(
    settings: PlanSettings, stage: slice, weights: WeightEstimate | None, draft: bool, spec: ModelSpec
) -> tuple[Line, ...]:
    """The lines of the ledger that are not pools. Empty without a device."""
    device, parallel = settings.rank_device, settings.parallel
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
    weights_of_both = (line, *draft_weight_lines(settings))
    if settings.mem_fraction_static is not None:
        rest = device.memory - int(device.memory * settings.mem_fraction_static)
        why = f"what --mem-fraction-static {settings.mem_fraction_static:g} leaves of {format_bytes(device.memory)}"
        return (*weights_of_both, Line(name="rest", bytes=rest, why=f"activations, graphs and reserve: {why}"))
    working = working_memory(
        chunk=settings.max_num_batched_tokens,
        hidden_size=spec.hidden_size,
        vocabulary=spec.vocab_size,
        graph_batch=settings.largest_graph,
        ranks=parallel.tp * parallel.pp,
        device=device,
    )
    return (*weights_of_both, *working)


def move_lines(settings: PlanSettings, groups: Sequence[GroupSpec]) -> tuple[Line, ...]:
    """The ledger's line of memory through which frames of an arena move; empty without one, or without a device."""
    within_rest = settings.mem_fraction_static is not None and settings.measured is None
    if not settings.arena or settings.rank_device is None or within_rest or not in_arena(groups):
        return ()
    return (Line(name="moves", bytes=MOVE_BYTES, why="frames that move in the arena are copied through it"),)


def _kv_bytes(settings: PlanSettings, lines: Sequence[Line]) -> int:
    """The budget of the pools of a rank. Raises NoRoom if the device has less left for them."""
    device, wanted = settings.rank_device, settings.kv_memory
    if device is None:
        if wanted is None:
            raise InvalidInput(
                "a plan needs bytes to split.",
                fix="give --kv-memory 40GiB, or --gpu h100-80gb, or --device-memory 80GiB.",
            )
        return wanted
    taken = sum(line.bytes for line in lines)
    left = device.memory - taken
    if left <= (wanted or 0):
        parts = [f"{line.name} {format_bytes(line.bytes)}" for line in lines]
        parts += [f"pools {format_bytes(wanted)}"] if wanted else []
        raise NoRoom(
            f"{device.name} has {format_bytes(device.memory)}, and {', '.join(parts)} take "
            f"{format_bytes(taken + (wanted or 0))} of it"
            + ("." if wanted else ", which leaves nothing for pools of any context or KV dtype."),
            left=left,
        )
    return left if wanted is None else wanted
