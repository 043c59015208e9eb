"""Plan: the whole answer for one server, from a model's spec and settings, and `make_plan` that finds it.

The plan that is printed, the pools that are built and the requests that are admitted are this one object.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial

from quire.errors import InvalidInput, PlanError
from quire.plan.budget import MemoryPlan, format_bytes
from quire.plan.configurator import (
    MemoryPoolConfig,
    MemoryPoolConfigurator,
    PoolOptions,
    create_memory_pool_configurator,
)
from quire.plan.devices import Device, Line, working_memory
from quire.plan.mix import Mix, uniform
from quire.plan.parallel import Parallelism
from quire.plan.reserve import Speculation
from quire.spec.families import draft_like
from quire.spec.group import GroupSpec
from quire.spec.kv_format import KVFormat, kv_format, plain_format
from quire.spec.layers import AttentionCall
from quire.spec.model import ModelSpec
from quire.spec.pages import pages_for
from quire.spec.weights import WeightEstimate

_DEFAULT_PAGE = 16
_DEFAULT_LENGTH = 8192  # tokens of an expected request, when nobody says
_STATE_GRID = 64  # tokens between places where a recurrence can leave its state: the chunk of its scan
_ROUNDS = 8  # of graphs for those that fit: each has fewer, and a few are enough
_NO_LIMIT = 2**62  # tokens of a stage that keeps states alone
_LARGEST_GRAPH = 256  # requests of the largest captured graph


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What is asked for. Bytes and tokens are of one rank unless said; None: the planner chooses and says so.

    Either `kv_memory`, exactly the bytes that the pools may take, or `device`, of which the pools get what weights and
    working memory leave; `mem_fraction_static` is the share of the device for weights and pools together. `measured`
    are ledger lines that replace the estimates. `context` is the longest request, `concurrency` how many must run at
    once, `mix` what is expected. `window_pool` off keeps windows whole.
    """

    kv_memory: int | None = None
    device: Device | None = None
    mem_fraction_static: float | None = None
    weight_bytes: int | None = None
    measured: tuple[Line, ...] | None = None
    kv_dtype: str = "auto"
    page_size: int | None = None
    context: int | None = None
    concurrency: int | None = None
    mix: Mix | None = None
    chunk: int = 2048
    shares: bool = True
    parallel: Parallelism = field(default_factory=Parallelism)
    speculation: Speculation | None = None
    swa_full_tokens_ratio: Fraction | None = None
    mamba_full_memory_ratio: Fraction | None = None
    max_mamba_cache_size: int | None = None
    max_total_tokens: int | None = None
    max_requests: int = 256
    graph_batch: int | None = None
    window_pool: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a server is built from, shown for the rank that decides: the one with the least room.

    `kv_bytes` is what the pools of that rank may take, `config` what they are; `stages` are the pools of every pipeline
    stage that keeps something, at the same tokens, and `stage` is the one that decides. Tokens are those of one
    attention group. `ledger` has a line for every byte of the budget on the device, and lines for the host. `notes` say
    what was assumed.
    """

    spec: ModelSpec
    settings: PlanSettings
    page_size: int
    context: int
    mix: Mix
    config: MemoryPoolConfig
    kv_bytes: int
    stage: int
    stages: tuple[MemoryPoolConfig, ...]
    configurator: MemoryPoolConfigurator = field(repr=False)
    ledger: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def memory(self) -> MemoryPlan:
        """What the cache and the pools of this rank are built from."""
        return MemoryPlan(
            page_size=self.page_size,
            groups=tuple(pool.group for pool in self.config.pools),
            frames=tuple(pool.frames for pool in self.config.pools),
            num_pages=self.config.max_total_num_tokens // self._step,
            token_ranks=self.settings.parallel.dcp,
            context=self.context,
            max_requests=max(1, self.max_running_requests // self.settings.parallel.dp),
            speculation=self.settings.speculation,
        )

    @property
    def graph_batch(self) -> int:
        """Requests of the largest captured graph that the ledger has room for."""
        settings = self.settings
        return settings.graph_batch or min(_LARGEST_GRAPH, settings.concurrency or settings.max_requests)

    @property
    def _step(self) -> int:
        """Tokens of one page, over the ranks that share it."""
        return self.page_size * self.settings.parallel.dcp

    @property
    def state_slots(self) -> int | None:
        """States that every stage with states has; None without any."""
        return min((one.state_slots for one in self.stages if one.state_slots is not None), default=None)

    @property
    def window_tokens(self) -> int | None:
        """Tokens of the smallest window pool of all stages; None without any."""
        found = [one.swa_max_total_num_tokens for one in self.stages]
        return min((tokens for tokens in found if tokens is not None), default=None)

    @property
    def full_tokens(self) -> int | None:
        """Tokens of the full pools; None for a model of windows and states only."""
        has_full = any(one.full_max_total_num_tokens is not None for one in self.stages)
        return self.config.max_total_num_tokens if has_full else None

    @property
    def max_running_requests(self) -> int:
        """Requests that may run at once, over all attention groups: as asked, or 256, and as the states allow."""
        asked = self.settings.concurrency or self.settings.max_requests
        if self.state_slots is None:
            return asked
        return min(asked, self.state_slots // self.configurator.options.states_per_request * self.settings.parallel.dp)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that one more token takes on this rank, over all pools that grow with it."""
        return self.config.coeff

    @property
    def largest_request(self) -> int:
        """The longest request ever admitted, prompt and output together, in tokens."""
        return self.memory.largest_request

    @property
    def minimum_reusable_prefix(self) -> int | None:
        """Tokens that two prompts must share before anything is reused; None where prefixes are not kept.

        A page, and with states a place where a state can be left, too.
        """
        if not self.settings.shares:
            return None
        return self._step if self.state_slots is None else math.lcm(_STATE_GRID, self._step)

    def requests_at(self, length: int) -> int:
        """Requests of `length` tokens, prompt and output together, that run at once, over all attention groups."""
        return min(self.room_for(length), self.max_running_requests)

    def room_for(self, length: int) -> int:
        """Requests of `length` tokens that the pools have room for, whether or not as many may run."""
        memory = self.memory
        if length > memory.largest_request:
            return 0
        pages = max(1, memory.pages_of(length))
        found = []
        for pool in (pool for one in self.stages for pool in one.pools):
            if pool.group.reach.kind == "full":
                found.append(pool.frames // pages)
            elif pool.group.reach.kind in ("window", "chunk"):
                kept = self.configurator.options.window_tokens(pool.group.reach, self.page_size)
                found.append(pool.frames // min(pages, pages_for(kept, self._step)))
        if self.state_slots is not None:
            found.append(self.state_slots // self.configurator.options.states_per_request)
        return min(found) * self.settings.parallel.dp

    @property
    def required(self) -> int:
        """Requests of the full context that must fit at once."""
        return self.settings.concurrency or 1

    @property
    def fits(self) -> bool:
        """Whether that many do."""
        return self.requests_at(self.context) >= self.required

    def bytes_for(self, tokens: int) -> int:
        """The KV memory of this rank from which a plan holds that many tokens."""
        pages = pages_for(tokens, self._step)
        return self.configurator.bytes_for(pages * self._step, self.page_size)


def make_plan(spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None = None) -> Plan:
    """Plan a server.

    Every pipeline stage is solved for; the tokens are those of the stage with the least room, all stages get pools for
    that many, and the rank of that stage is the one shown. More requests than fit are not planned for: then the plan is
    that of the most that do. Raises PlanError where the pools cannot hold one page, or a request its window or state;
    InvalidInput where settings do not go together or do not fit the model.
    """
    plan = _attempt(spec, settings, weights, settings.concurrency)
    if isinstance(plan, Plan) and settings.concurrency is None:
        return _with_graphs_for_those_that_fit(spec, settings, weights, plan)
    if isinstance(plan, Plan) and plan.fits:
        return plan
    if settings.concurrency is None:
        raise plan if isinstance(plan, PlanError) else AssertionError
    low, high = 0, settings.concurrency
    best = _attempt(spec, settings, weights, None)
    if isinstance(best, PlanError):
        raise best
    while high - low > 1:
        middle = (low + high) // 2
        found = _attempt(spec, settings, weights, middle)
        if isinstance(found, Plan) and found.requests_at(found.context) >= middle:
            low, best = middle, found
        else:
            high = middle
    return best


def _with_graphs_for_those_that_fit(
    spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None, plan: Plan
) -> Plan:
    """The plan again, with graphs captured for as many requests as it holds: fewer graphs make room for more pages."""
    for _ in range(_ROUNDS):
        batch = max(1, plan.requests_at(plan.context))
        if batch >= plan.graph_batch:
            break
        plan = _plan(spec, replace(settings, graph_batch=batch), weights, None)
    return replace(plan, settings=settings)


def _attempt(
    spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None, concurrency: int | None
) -> Plan | PlanError:
    """The plan with room for that many requests (None: for as many as the load has), or why there is none."""
    try:
        return _plan(spec, settings, weights, concurrency)
    except PlanError as error:
        return error


def _plan(spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None, concurrency: int | None) -> Plan:
    parallel = settings.parallel
    parallel.check(spec)
    context = _context(spec, settings)
    spec, num_drafts = _with_drafts(spec, settings.speculation)
    page_size = settings.page_size or _page_size(spec)
    mix = (settings.mix or _default_mix(settings, context)).clipped(context)
    whole = _groups(spec, settings, page_size, (0, len(spec.layers)), num_drafts)
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
    solved = _solve_stages(spec, settings, weights, options, page_size, num_drafts)
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
    return replace(plan, ledger=_ledger(plan, best.lines), notes=_notes(plan))


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
        return replace(self, config=self.configurator.calculate_pool_sizes_from_max_tokens(tokens, page_size))


def _solve_stages(
    spec: ModelSpec,
    settings: PlanSettings,
    weights: WeightEstimate | None,
    options: PoolOptions,
    page_size: int,
    num_drafts: int,
) -> list[_Solved]:
    """Every stage that keeps something. Stages of states alone come last: they limit requests, and tokens least."""
    found: list[_Solved] = []
    stages = settings.parallel.stages(len(spec.layers))
    for index, stage in enumerate(stages):
        drafts = num_drafts if index == len(stages) - 1 else 0
        groups_at = partial(_groups_on, spec, settings, (stage.start, stage.stop), drafts)
        groups = groups_at(page_size)
        if not groups:
            continue
        lines = _device_lines(settings, stage, weights, drafts > 0, spec.hidden_size)
        kv_bytes = _kv_bytes(settings, lines)
        configurator = create_memory_pool_configurator(groups_at, options, page_size=page_size)
        config = configurator.calculate_pool_sizes(kv_bytes, page_size)
        if len(stages) > 1 and not config.coeff:
            config = replace(config, max_total_num_tokens=_NO_LIMIT)
        found.append(_Solved(stage=index, config=config, configurator=configurator, kv_bytes=kv_bytes, lines=lines))
    return found


def _groups_on(
    spec: ModelSpec, settings: PlanSettings, stage: tuple[int, int], drafts: int, page_size: int
) -> tuple[GroupSpec, ...]:
    return _groups(spec, settings, page_size, stage, drafts)


def _groups(
    spec: ModelSpec, settings: PlanSettings, page_size: int, stage: tuple[int, int], drafts: int
) -> tuple[GroupSpec, ...]:
    kept = kv_format(settings.kv_dtype, spec.dtype)
    return _cached_groups(spec, page_size, kept, settings.parallel.attention_tp, stage, drafts, settings.window_pool)


@lru_cache(maxsize=512)
def _cached_groups(
    spec: ModelSpec, page_size: int, kept: KVFormat, tp: int, stage: tuple[int, int], drafts: int, window_pool: bool
) -> tuple[GroupSpec, ...]:
    """Groups of a stage; advice and sweeps ask for the same ones again and again."""
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


def _with_drafts(spec: ModelSpec, speculation: Speculation | None) -> tuple[ModelSpec, int]:
    """The spec with draft layers where speculation has any: the model's own, else some like its attention."""
    if speculation is None:
        return spec, 0
    if speculation.num_layers and not spec.drafts:
        spec = replace(spec, drafts=(draft_like(spec.layers),))
    return spec.with_rollback(), speculation.num_layers


def _page_size(spec: ModelSpec) -> int:
    """16, or the next multiple that holds whole entries of every field."""
    kept = plain_format(spec.dtype)
    pers = {part.per for call in set(spec.calls) for part in call.parts(kept, spec.dtype)}
    return math.lcm(_DEFAULT_PAGE, *(per for per in pers if per > 1))


def _default_mix(settings: PlanSettings, context: int) -> Mix:
    if settings.context is not None:
        return uniform(context, f"requests of {context:,} tokens")
    length = min(context, _DEFAULT_LENGTH)
    return uniform(length, f"requests of {length:,} tokens")


def _device_lines(
    settings: PlanSettings, stage: slice, weights: WeightEstimate | None, draft: bool, hidden_size: int
) -> tuple[Line, ...]:
    """What of the device is not for pools. Empty where nobody named a device."""
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
    batch = settings.graph_batch or min(_LARGEST_GRAPH, settings.concurrency or settings.max_requests)
    working = working_memory(
        chunk=settings.chunk,
        hidden_size=hidden_size,
        graph_batch=batch,
        ranks=parallel.tp * parallel.pp,
        device=device,
    )
    return (line, *working)


def _kv_bytes(settings: PlanSettings, lines: Sequence[Line]) -> int:
    """What the pools of a rank may take. Raises PlanError where the rest does not leave any."""
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
    """What gives pools more of the device."""
    if settings.mem_fraction_static is not None:
        return "raise --mem-fraction-static, split the model over more ranks (--tp, --pp), or use a larger device."
    rest = ", or ask for less KV memory." if wanted else "."
    return "split the model over more ranks (--tp, --pp), use smaller weights or a larger device" + rest


def _ledger(plan: Plan, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """A line for every byte of the budget, and the tables on the host."""
    pools, settings = plan.config.pools, plan.settings
    found = list(lines)
    for pool in pools:
        size, frames = pool.bytes_per_frame, pool.frames
        why = f"{frames:,} frames of {size:,} bytes: {pool.why}"
        found.append(Line(name=f"pool {pool.name}", bytes=frames * size, why=why))
    padding = sum(pool.bytes_per_frame for pool in pools)
    found.append(Line(name="padding", bytes=padding, why="frame 0 of every pool, where padded tokens write"))
    left = plan.kv_bytes - plan.config.bytes
    found.append(Line(name="unused", bytes=left, why=_unused_why(plan)))
    if settings.device is not None and settings.kv_memory is not None:
        rest = settings.device.memory - sum(line.bytes for line in found)
        found.append(Line(name="not asked for", bytes=rest, why="what --kv-memory leaves of the device"))
    memory = plan.memory
    rows = f"{memory.max_requests:,} requests of up to {memory.pages_per_row:,} page ids of 4 bytes"
    found.append(Line(name="request tables", bytes=memory.row_bytes, why=rows, where="host"))
    return tuple(found)


def _unused_why(plan: Plan) -> str:
    cap, tokens = plan.settings.max_total_tokens, plan.config.max_total_num_tokens
    if cap is not None and tokens <= cap:
        return f"beyond the cap of {cap:,} tokens"
    return "less than one more page takes"


def _notes(plan: Plan) -> tuple[str, ...]:
    """What was assumed or resolved, in sentences."""
    settings, parallel, options = plan.settings, plan.settings.parallel, plan.configurator.options
    notes = []
    kinds = {pool.group.reach.kind for one in plan.stages for pool in one.pools}
    ratios = (settings.swa_full_tokens_ratio, settings.mamba_full_memory_ratio, settings.max_mamba_cache_size)
    if len(kinds) > 1 and not any(ratio is not None for ratio in ratios):
        asked = settings.mix is not None or settings.context is not None
        notes.append(
            f"pools are split for {plan.mix.source}"
            + ("." if asked else "; --context, --input-tokens and --output-tokens, or --trace, say otherwise.")
        )
    if settings.mem_fraction_static is not None and settings.device is not None:
        share = int(settings.device.memory * settings.mem_fraction_static)
        notes.append(f"--mem-fraction-static {settings.mem_fraction_static:g} is {format_bytes(share)} of this device.")
    if parallel.pp > 1:
        notes.append(f"stage {plan.stage + 1} of {parallel.pp} has the least room and decides.")
    if parallel.dp > 1:
        notes.append(f"tokens are those of one of {parallel.dp} attention groups; requests are those of all.")
    notes += _idle_options(plan, kinds)
    notes += _uneven_heads(plan)
    cap = settings.max_total_tokens
    if cap is not None and plan.config.max_total_num_tokens <= cap:
        notes.append(f"capped at {cap:,} tokens; every pool follows the cap.")
    if settings.concurrency is not None and plan.max_running_requests < settings.concurrency:
        notes.append(f"{plan.max_running_requests:,} requests may run at once: there are states for no more.")
    step = plan.page_size * parallel.dcp
    for pool in plan.config.pools:
        room = pool.frames * step - pool.group.reach.tokens - step
        if settings.swa_full_tokens_ratio is not None and pool.group.reach.kind != "full" and 0 < room < options.chunk:
            notes.append(f"the pool '{pool.name}' has room for steps of {room:,} prompt tokens, not {options.chunk:,}.")
    if step > plan.context:
        notes.append(f"a page of {step:,} tokens is longer than the context: nothing can be reused.")
    return tuple(notes)


def _idle_options(plan: Plan, kinds: set[str]) -> list[str]:
    """Settings that were given and change nothing for this model."""
    settings = plan.settings
    slides, states = kinds & {"window", "chunk"} and len(kinds) > 1, "state" in kinds
    found = []
    if settings.swa_full_tokens_ratio is not None and not slides:
        found.append("--swa-full-tokens-ratio has no effect: there are no window pools beside full ones.")
    if (settings.mamba_full_memory_ratio is not None or settings.max_mamba_cache_size is not None) and not states:
        found.append("--mamba-full-memory-ratio and --max-mamba-cache-size have no effect: this model has no states.")
    if settings.speculation is not None and settings.speculation.num_layers and settings.device is not None:
        found.append("weights of a draft that the model does not bring itself are not in the ledger.")
    return found


def _uneven_heads(plan: Plan) -> list[str]:
    """What to know of heads that do not divide over the ranks."""
    ranks, heads = plan.settings.parallel.attention_tp, plan.spec.query_heads
    if ranks == 1:
        return []
    found = (
        [f"{heads} query heads do not divide over {ranks} ranks; most engines refuse that."] if heads % ranks else []
    )
    kv_heads = {call.kv_heads for call in plan.spec.calls if isinstance(call, AttentionCall)}
    if kv_heads and max(kv_heads) < ranks and plan.settings.parallel.dcp == 1:
        found.append(
            f"{max(kv_heads)} KV heads on {ranks} ranks: each head is held by {ranks // max(kv_heads)} of them."
        )
    return found
