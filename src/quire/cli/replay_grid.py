"""The grid of a replay: models, pools, policies and tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from quire.cli.plan_request import PlanRequest
from quire.cli.planned_model import planned_model
from quire.cli.replay import ReplayedCache, ReplayedEngine, ReplayedHiSparse
from quire.errors import InvalidInput
from quire.plan.budget import MemoryPlan
from quire.plan.plan import Plan
from quire.plan.source import read_model_config
from quire.plan.step_cost import CostModel
from quire.prefix.evict import DEFAULT_POLICY, eviction_policy
from quire.settings.fields import StepFields
from quire.settings.tenants import read_tenants
from quire.sim.clock import measure_engine
from quire.sim.comparison import Grid, SimulatedModel
from quire.sim.hisparse import SimulatedHiSparse
from quire.sim.pools import PLAIN, read_pool_sizes
from quire.sim.replay import ReplaySettings
from quire.sim.resizing import parse_sizes
from quire.sim.selections import Selections
from quire.sim.settings import SimulatedTiers
from quire.spec.config_reader import ConfigReader
from quire.spec.record_size import HEADER_BYTES
from quire.spec.speculation import SpeculativeConfig
from quire.spec.weights import active_parameters

DEFAULT_POOL = "1/8"
"""Share of the working set."""

_COMPARED = "lru,density"
_GPU = "h100-80gb"
_COSTS_LIKE = "llama-3.1-8b"
"""The cost of the plain model's steps."""


def grid_of(
    cache: ReplayedCache,
    engine: ReplayedEngine,
    tiers: SimulatedTiers | None = None,
    hisparse: ReplayedHiSparse | None = None,
    *,
    explain: bool = False,
) -> Grid:
    """What to compare. Raises InvalidInput for bad values, and the errors of reading a model."""
    speculation, acceptance = _drafts(engine.speculate)
    hot = _hisparse(hisparse or ReplayedHiSparse(), cache, engine, tiers or SimulatedTiers())
    return Grid(
        models=[_model(name, engine) for name in cache.models or (PLAIN,)],
        policies=_policies(cache.policies or (DEFAULT_POLICY if explain else _COMPARED)),
        pools=read_pool_sizes(cache.pool_tokens or DEFAULT_POOL),
        grows=cache.pool_tokens is None,
        page_sizes=_page_sizes(cache.page_sizes),
        max_running=engine.max_running_requests,
        speculation=speculation,
        tiers=_tiers(tiers) if tiers is not None and not hot else (),
        hisparse=hot,
        arena=engine.arena,
        resizes=_resizes(engine.resizes, hot),
        settings=ReplaySettings(
            order=engine.order,
            chunk=engine.max_num_batched_tokens,
            overlap=bool(engine.overlap),
            target_itl_ms=engine.shared(StepFields).get("target_itl_ms", "off"),
            check=engine.check,
            explain=explain,
            acceptance=acceptance,
            eviction_worth=cache.eviction_worth,
            endings=cache.endings,
            tenants=read_tenants(engine.tenants),
        ),
    )


def _drafts(text: str | None) -> tuple[SpeculativeConfig | None, float | None]:
    """How many drafts, and the chance of each to be right."""
    if text is None:
        return None, None
    number, _, chance = text.partition(",")
    try:
        found = SpeculativeConfig.parse({"method": "ngram", "num_steps": int(number)})
        return found, float(chance) if chance else None
    except ValueError:
        raise InvalidInput(f"'{text}' says no number of drafts.", fix="write --speculate 4, or 4,0.7.") from None


def _resizes(text: str | None, hot: Sequence[SimulatedHiSparse]) -> tuple[tuple[float, Fraction], ...]:
    """Sizes of the pools and their times. Raises InvalidInput."""
    if text is None:
        return ()
    if hot:
        raise InvalidInput("--resizes: hot buffers have one size.", fix="leave --hisparse out.")
    return parse_sizes(text)


def _policies(text: str) -> list[str]:
    found = list(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for name in found:
        eviction_policy(name)
    return found


def _page_sizes(text: str) -> list[int]:
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise InvalidInput(f"'{text}' are not page sizes.", fix="write them as 1,16,64.")
    return found


def _tiers(asked: SimulatedTiers) -> Sequence[SimulatedTiers]:
    """The tiers, if there are any. Raises InvalidInput if they contradict other settings."""
    if asked.has_host:
        return (asked,)
    if asked != SimulatedTiers():
        raise InvalidInput("tiers are asked for, and no host tier is.", fix="give --host-tokens or --host-memory too.")
    return ()


def _hisparse(
    asked: ReplayedHiSparse, cache: ReplayedCache, engine: ReplayedEngine, tiers: SimulatedTiers
) -> Sequence[SimulatedHiSparse]:
    """The hot buffers, if there are any. Raises InvalidInput if they contradict other settings."""
    if asked.hisparse is None:
        if asked != ReplayedHiSparse():
            raise InvalidInput("selections are for hot buffers, and there are none.", fix="add --hisparse '{}'.")
        return ()
    if asked.selections is not None and asked.selection_drift is not None:
        raise InvalidInput("selections are either recorded or drawn.", fix="leave --selection-drift out.")
    if not cache.models:
        raise InvalidInput("--hisparse: the plain model selects no tokens.", fix="add --model deepseek-v3.2, say.")
    if asked.hisparse.selection is not None:
        raise InvalidInput(
            f"--hisparse: selections of {asked.hisparse.selection} are not simulated.",
            fix="use a model with an indexer.",
        )
    if engine.speculate is not None:
        raise InvalidInput("--hisparse: not yet with --speculate.", fix="leave one of them out.")
    if tiers.model_fields_set - {"host_bandwidth"}:
        raise InvalidInput(
            "--hisparse: not yet with tiers.", fix="of the options for tiers, give --host-bandwidth alone."
        )
    found = SimulatedHiSparse(
        config=asked.hisparse,
        selections=Selections.load(asked.selections) if asked.selections is not None else None,
        source=asked.selections.name if asked.selections is not None else "",
        link_rate=(tiers.host_bandwidth or 0.0) * 1e9,
        ranks=engine.tensor_parallel_size,
        seed=cache.trace_seed,
        **({} if asked.selection_drift is None else {"drift": asked.selection_drift}),
    )
    return (found,)


def _model(name: str, engine: ReplayedEngine) -> SimulatedModel:
    if name == PLAIN:
        return SimulatedModel(cost=cost_of(_COSTS_LIKE, engine, plain=True), record_bytes=_plain_record_bytes)
    cost = cost_of(name, engine, plain=False)
    return SimulatedModel(name=name, spec=planned_model(name).spec, cost=cost)


def _plain_record_bytes(plan: MemoryPlan) -> tuple[int, ...]:
    """Records of the model whose steps the plain one costs."""
    spec = planned_model(_COSTS_LIKE).spec
    return tuple(group.layout.bytes_per_frame + HEADER_BYTES for group in spec.groups(plan.page_size))


def cost_of(name: str, engine: ReplayedEngine, *, plain: bool) -> Callable[[MemoryPlan], CostModel]:
    """The costs of a model's steps; those of a plain one are of the model of that name, whatever its pools hold."""
    if engine.fit:
        fitted = measure_engine()
        return lambda plan: fitted
    if engine.prefill_rate is not None or engine.decode_ms is not None:
        if engine.prefill_rate is None or engine.decode_ms is None:
            raise InvalidInput("one of --prefill-rate and --decode-ms is missing.", fix="give both, or a --gpu.")
        given = CostModel.from_flags(prefill_rate=engine.prefill_rate, decode_ms=engine.decode_ms)
        return lambda plan: given
    model = planned_model(name)
    if model.weights is None:
        raise InvalidInput(f"the weights of {name} cannot be estimated.", fix="give --prefill-rate and --decode-ms.")
    weights = model.weights.bytes_on_rank()
    active = active_parameters(ConfigReader(read_model_config(name)[0]), model.weights)

    def priced(plan: MemoryPlan) -> CostModel:
        groups = model.spec.groups(plan.page_size) if plain else plan.groups
        return CostModel.from_device(
            engine.gpu or _GPU,
            model.spec,
            groups,
            weight_bytes=weights,
            active_parameters=active,
            ranks=engine.tensor_parallel_size,
        )

    return priced


def planned_rates(request: PlanRequest, plan: Plan, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
    """Prompt tokens a second, of prompts one after the other; and output tokens a second, of as many requests at once
    as the plan holds, in the middle of their answers."""
    assert request.planned is not None and request.gpu is not None
    cost = cost_of(
        request.planned, ReplayedEngine(gpu=request.gpu, tensor_parallel_size=request.tensor_parallel_size), plain=False
    )(plan.memory)
    starts = np.arange(0, prompt_tokens, request.max_num_batched_tokens)
    ends = np.minimum(starts + request.max_num_batched_tokens, prompt_tokens)
    seconds = sum(cost.launch + cost.seconds(starts[at : at + 1], ends[at : at + 1]) for at in range(len(starts)))
    running = max(1, min(request.max_running_requests, plan.memory.num_tokens // (prompt_tokens + output_tokens)))
    contexts = np.full(running, prompt_tokens + output_tokens // 2)
    return prompt_tokens / seconds, running / (cost.launch + cost.seconds(contexts - 1, contexts))
