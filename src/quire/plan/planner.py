"""Plan: the whole answer for one server, from a model's spec and settings, and `make_plan` that finds it.

The plan that is printed, the pools that are built and the requests that are admitted are this one object.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from quire.errors import InvalidInput, PlanError
from quire.plan.budget import MemoryPlan, format_bytes
from quire.plan.configurator import (
    GroupsAt,
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
from quire.spec.kv_format import kv_format, plain_format
from quire.spec.model import ModelSpec
from quire.spec.pages import pages_for
from quire.spec.weights import WeightEstimate

_DEFAULT_PAGE = 16
_DEFAULT_LENGTH = 8192  # tokens of an expected request, when nobody says
_STATE_GRID = 64  # tokens between places where a recurrence can leave its state: the chunk of its scan
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
    window_pool: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a server is built from, for the rank that decides: the one with the least room.

    `kv_bytes` is what its pools may take, `pools` what they take. `ledger` has a line for every byte of the budget on
    the device, and lines for the host. `stage` is the pipeline stage that decides. `notes` say what was assumed.
    """

    spec: ModelSpec
    settings: PlanSettings
    page_size: int
    context: int
    mix: Mix
    config: MemoryPoolConfig
    kv_bytes: int
    ledger: tuple[Line, ...]
    stage: int
    configurator: MemoryPoolConfigurator = field(repr=False)
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
            max_requests=self.max_running_requests,
            speculation=self.settings.speculation,
        )

    @property
    def _step(self) -> int:
        """Tokens of one page, over the ranks that share it."""
        return self.page_size * self.settings.parallel.dcp

    @property
    def max_running_requests(self) -> int:
        """Requests that may run at once: as asked, or 256, and never more than the states allow."""
        asked = self.settings.concurrency or self.settings.max_requests
        return min(asked, self.config.max_running_requests or asked)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that one more token takes on this rank, over all pools that grow with it."""
        return self.config.coeff

    @property
    def largest_request(self) -> int:
        """The longest request ever admitted, prompt and output together: its last token is drawn and never written."""
        return min(self.context, self.config.max_total_num_tokens + 1)

    @property
    def minimum_reusable_prefix(self) -> int:
        """Tokens that two prompts must share before anything is reused.

        A page, and with states a place where a state can be left, too.
        """
        if any(pool.group.reach.kind == "state" for pool in self.config.pools):
            return math.lcm(_STATE_GRID, self._step)
        return self._step

    def requests_at(self, length: int) -> int:
        """Requests of `length` tokens, prompt and output together, that the pools hold at once."""
        found = [self.config.max_running_requests] if self.config.max_running_requests is not None else []
        for pool in self.config.pools:
            reach = pool.group.reach
            if reach.kind == "full":
                found.append(pool.frames // max(1, pages_for(length - 1, self._step)))
            elif reach.kind in ("window", "chunk"):
                kept = reach.tokens + self._step + self.configurator.options.reserve(self.page_size)
                found.append(pool.frames // max(1, pages_for(min(length - 1, kept), self._step)))
        return min(found, default=0) if length <= self.largest_request else 0

    @property
    def required(self) -> int:
        """Requests of the full context that must fit at once."""
        return self.settings.concurrency or 1

    @property
    def fits(self) -> bool:
        """Whether that many do."""
        return self.requests_at(self.context) >= self.required

    def bytes_for(self, tokens: int) -> int:
        """The KV memory from which a plan holds that many tokens."""
        pages = pages_for(tokens, self._step)
        return self.configurator.bytes_for(pages * self._step, self.page_size)


def make_plan(spec: ModelSpec, settings: PlanSettings, weights: WeightEstimate | None = None) -> Plan:
    """Plan a server.

    Every pipeline stage is solved for; the tokens are those of the stage with the least room, and its rank is the one
    shown. Raises PlanError where the pools cannot hold one page, or a request its window or state; InvalidInput where
    settings do not go together or do not fit the model.
    """
    settings.parallel.check(spec)
    context = _context(spec, settings)
    spec, num_drafts = _with_drafts(spec, settings.speculation)
    page_size = settings.page_size or _page_size(spec)
    mix = (settings.mix or _default_mix(settings, context)).clipped(context)
    stages = settings.parallel.stages(len(spec.layers))
    solved: list[_Solved] = []
    for index, stage in enumerate(stages):
        drafts = num_drafts if index == len(stages) - 1 else 0
        groups_at = _groups_at(spec, settings, stage, drafts)
        if groups_at(page_size):  # a stage whose layers keep nothing limits nothing
            lines = _device_lines(settings, stage, weights, drafts > 0)
            solved.append(_solve(settings, groups_at, page_size, mix, index, lines))
    if not solved:
        raise InvalidInput(f"no layer of {spec.architecture} keeps anything.", fix="no cache is needed.")
    best = min(solved, key=lambda one: one.config.max_total_num_tokens)
    plan = Plan(
        spec=spec,
        settings=settings,
        page_size=page_size,
        context=context,
        mix=mix,
        config=best.config,
        kv_bytes=best.kv_bytes,
        ledger=(),
        stage=best.stage,
        configurator=best.configurator,
    )
    return replace(plan, ledger=_ledger(plan, best.lines), notes=_notes(plan, len(stages)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """One pipeline stage."""

    stage: int
    config: MemoryPoolConfig
    configurator: MemoryPoolConfigurator
    kv_bytes: int
    lines: tuple[Line, ...]


def _solve(
    settings: PlanSettings, groups_at: GroupsAt, page_size: int, mix: Mix, stage: int, lines: tuple[Line, ...]
) -> _Solved:
    kv_bytes = _kv_bytes(settings, lines)
    options = PoolOptions(
        mix=mix,
        chunk=settings.chunk,
        shares=settings.shares,
        token_ranks=settings.parallel.dcp,
        speculation=settings.speculation,
        max_running_requests=settings.concurrency,
        swa_full_tokens_ratio=settings.swa_full_tokens_ratio,
        mamba_full_memory_ratio=settings.mamba_full_memory_ratio,
        max_mamba_cache_size=settings.max_mamba_cache_size,
    )
    configurator = create_memory_pool_configurator(groups_at, options, page_size=page_size)
    try:
        config = configurator.calculate_pool_sizes(kv_bytes, page_size)
    except PlanError:
        if settings.concurrency is None:
            raise
        # What does fit is planned, so that the plan can say how much that is.
        options = replace(options, max_running_requests=None)
        configurator = create_memory_pool_configurator(groups_at, options, page_size=page_size)
        config = configurator.calculate_pool_sizes(kv_bytes, page_size)
    cap = settings.max_total_tokens
    if cap is not None and cap < config.max_total_num_tokens:
        config = configurator.calculate_pool_sizes_from_max_tokens(cap, page_size)
    return _Solved(stage=stage, config=config, configurator=configurator, kv_bytes=kv_bytes, lines=lines)


def _context(spec: ModelSpec, settings: PlanSettings) -> int:
    if settings.context is not None and settings.context > spec.context_length:
        raise InvalidInput(
            f"a context of {settings.context:,} tokens is beyond the model's {spec.context_length:,}.",
            fix=f"set it to at most {spec.context_length:,}.",
        )
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


def _groups_at(spec: ModelSpec, settings: PlanSettings, stage: slice, drafts: int) -> GroupsAt:
    kept = kv_format(settings.kv_dtype, spec.dtype)
    tp = settings.parallel.attention_tp

    def groups_at(page_size: int) -> tuple[GroupSpec, ...]:
        return spec.groups(page_size, kept, tp=tp, stage=stage, num_drafts=drafts, window_pool=settings.window_pool)

    return groups_at


def _device_lines(
    settings: PlanSettings, stage: slice, weights: WeightEstimate | None, draft: bool
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
        size = weights.bytes_on_rank(parallel.tp, range(stage.start, stage.stop), draft=draft)
        why = f"{weights.num_parameters / 1e9:,.2f} billion parameters, this rank's share"
        line = Line(name="weights", bytes=size, why=why, estimated=True)
    else:
        raise PlanError("the weights cannot be estimated.", fix="give their bytes on one rank with --weights 38GiB.")
    if settings.mem_fraction_static is not None:
        rest = device.memory - int(device.memory * settings.mem_fraction_static)
        why = f"what --mem-fraction-static {settings.mem_fraction_static:g} leaves of {format_bytes(device.memory)}"
        return (line, Line(name="activations, graphs and reserve", bytes=rest, why=why))
    batch = min(_LARGEST_GRAPH, settings.concurrency or settings.max_requests)
    ranks = parallel.tp * parallel.pp
    return (line, *working_memory(chunk=settings.chunk, graph_batch=batch, ranks=ranks, device=device))


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
            fix="split the model over more ranks (--tp, --pp), use smaller weights or a larger device"
            + (", or ask for less KV memory." if wanted else "."),
        )
    if settings.kv_memory is not None:
        return settings.kv_memory
    return device.memory - taken if device is not None else 0


def _ledger(plan: Plan, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """A line for every byte of the budget, and the tables on the host."""
    pools = plan.config.pools
    found = list(lines)
    for pool in pools:
        size, frames = pool.bytes_per_frame, pool.frames
        why = f"{frames:,} frames of {size:,} bytes: {pool.why}"
        found.append(Line(name=f"pool {pool.name}", bytes=frames * size, why=why))
    padding = sum(pool.bytes_per_frame for pool in pools)
    found.append(Line(name="padding", bytes=padding, why="frame 0 of every pool, where padded tokens write"))
    device = plan.settings.device
    budget = device.memory if device is not None else plan.kv_bytes
    unused = budget - sum(line.bytes for line in found)
    found.append(Line(name="unused", bytes=unused, why="less than one more page takes, or beyond a cap"))
    memory = plan.memory
    rows = f"{memory.max_requests:,} requests of up to {memory.pages_per_row:,} page ids of 4 bytes"
    found.append(Line(name="request tables", bytes=memory.row_bytes, why=rows, where="host"))
    return tuple(found)


def _notes(plan: Plan, stages: int) -> tuple[str, ...]:
    """What was assumed or resolved, in sentences."""
    settings, notes = plan.settings, []
    kinds = {pool.group.reach.kind for pool in plan.config.pools}
    ratios = (settings.swa_full_tokens_ratio, settings.mamba_full_memory_ratio, settings.max_mamba_cache_size)
    if kinds - {"full"} and len(plan.config.pools) > 1 and not any(ratio is not None for ratio in ratios):
        asked = settings.mix is not None or settings.context is not None
        notes.append(
            f"pools are split for {plan.mix.source}"
            + ("." if asked else "; --context, --input-tokens and --output-tokens, or --trace, say otherwise.")
        )
    if settings.mem_fraction_static is not None and settings.device is not None:
        share = int(settings.device.memory * settings.mem_fraction_static)
        notes.append(f"--mem-fraction-static {settings.mem_fraction_static:g} is {format_bytes(share)} of this device.")
    if stages > 1:
        notes.append(f"stage {plan.stage + 1} of {stages} has the least room and decides.")
    cap = settings.max_total_tokens
    if cap is not None and plan.config.max_total_num_tokens <= cap:
        notes.append(f"capped at {cap:,} tokens; every pool follows the cap.")
    most = plan.config.max_running_requests
    if settings.concurrency is not None and most is not None and most < settings.concurrency:
        notes.append(f"{most:,} requests may run at once: there are no states for {settings.concurrency:,}.")
    return tuple(notes)
