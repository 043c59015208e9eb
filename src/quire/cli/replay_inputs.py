"""From the words of `quire replay` to what is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from quire.cli.plan_inputs import PlannedModel, planned_model
from quire.errors import InvalidInput
from quire.offload.tier_settings import PrefetchPolicy, WritePolicy
from quire.plan.budget import MemoryPlan, parse_bytes, parse_tokens
from quire.plan.source import read_model_config
from quire.prefix.evict import eviction_policy
from quire.sim.clock import CostModel
from quire.sim.comparison import Grid, SimulatedModel
from quire.sim.pools import PLAIN, read_pool_sizes
from quire.sim.replay import ReplaySettings
from quire.sim.tiers import SimulatedTiers
from quire.spec.config_reader import ConfigReader
from quire.spec.record_size import HEADER_BYTES

_Word = TypeVar("_Word", bound=StrEnum)

DEFAULT_POOL = "1/8"
"""Of the working set."""

_COSTS_LIKE = "llama-3.1-8b"
"""What the steps of the plain model cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayWords:
    """The options of `quire replay` as they were written, or as they are where a command does not have them. Without
    `pool_tokens` it is `DEFAULT_POOL`, or more where that holds no request."""

    policy: str
    pool_tokens: str | None
    page_size: str
    models: Sequence[str]
    gpu: str = "h100-80gb"
    tp: int = 1
    prefill_rate: float | None = None
    decode_ms: float | None = None
    fit: bool = False
    max_running: int = 256
    chunk: int = 2048
    overlap: bool = False
    order: str = "fcfs"
    check: str = "off"
    explain: bool = False
    tiers: TierWords | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierWords:
    """The options of the tiers below the device, as they were written; bandwidths in GB/s."""

    host_tokens: str | None = None
    host_memory: str | None = None
    storage_tokens: str | None = None
    host_bandwidth: float | None = None
    storage_bandwidth: float | None = None
    write_policy: str = "write_through"
    prefetch_policy: str = "break_even"
    load: str = "break_even"

    @property
    def wanted(self) -> bool:
        """Whether they ask for any tier. Raises InvalidInput where they do not, and mean something else."""
        if self.host_tokens is not None or self.host_memory is not None:
            return True
        if self != TierWords():
            raise InvalidInput(
                "tiers are asked for, and no host tier is.", fix="give --host-tokens or --host-memory too."
            )
        return False


def grid_of(words: ReplayWords) -> Grid:
    """What to compare. Raises InvalidInput for what cannot be understood, and what reading a model raises."""
    policies = list(dict.fromkeys(part.strip().lower() for part in words.policy.split(",")))
    for name in policies:
        eviction_policy(name)
    if words.max_running < 1:
        raise InvalidInput(f"--max-running is {words.max_running}.", fix="give at least 1.")
    return Grid(
        models=[_model(name, words) for name in words.models or (PLAIN,)],
        policies=policies,
        pools=read_pool_sizes(words.pool_tokens or DEFAULT_POOL),
        grows=words.pool_tokens is None,
        page_sizes=_page_sizes(words.page_size),
        max_running=words.max_running,
        tiers=_tiers(words.tiers) if words.tiers is not None and words.tiers.wanted else None,
        settings=ReplaySettings(
            order=words.order,
            chunk=words.chunk,
            overlap=words.overlap,
            check=words.check,
            explain=words.explain,
        ),
    )


def _tiers(words: TierWords) -> SimulatedTiers:
    for name, bandwidth in (("host", words.host_bandwidth), ("storage", words.storage_bandwidth)):
        if bandwidth is not None and bandwidth <= 0:
            raise InvalidInput(f"--{name}-bandwidth is {bandwidth} GB/s.", fix="give more than 0.")
    return SimulatedTiers(
        host_tokens=parse_tokens(words.host_tokens) if words.host_tokens is not None else 0,
        host_bytes=parse_bytes(words.host_memory) if words.host_memory is not None else 0,
        storage_tokens=parse_tokens(words.storage_tokens) if words.storage_tokens is not None else 0,
        host_bandwidth=(words.host_bandwidth or 0.0) * 1e9,
        storage_bandwidth=(words.storage_bandwidth or 0.0) * 1e9,
        write=_one_of(WritePolicy, "--write-policy", words.write_policy),
        prefetch=_one_of(PrefetchPolicy, "--prefetch-policy", words.prefetch_policy),
        always=_one_of(_Load, "--load", words.load) is _Load.ALWAYS,
    )


class _Load(StrEnum):
    BREAK_EVEN = "break_even"
    ALWAYS = "always"


def _one_of(known: type[_Word], option: str, text: str) -> _Word:
    try:
        return known(text)
    except ValueError:
        raise InvalidInput(f"{option} {text} is not known.", fix=f"use one of {', '.join(known)}.") from None


def _page_sizes(text: str) -> list[int]:
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise InvalidInput(f"'{text}' are not page sizes.", fix="write them as 1,16,64.")
    return found


def _model(name: str, words: ReplayWords) -> SimulatedModel:
    if name == PLAIN:
        return SimulatedModel(cost=_cost(_COSTS_LIKE, words, plain=True), record_bytes=_plain_record_bytes)
    cost = _cost(name, words, plain=False)
    return SimulatedModel(name=name, spec=planned_model(name).spec, cost=cost)


def _plain_record_bytes(plan: MemoryPlan) -> tuple[int, ...]:
    """Of the model whose steps the plain one costs."""
    spec = planned_model(_COSTS_LIKE).spec
    return tuple(group.layout.bytes_per_frame + HEADER_BYTES for group in spec.groups(plan.page_size))


def _cost(name: str, words: ReplayWords, *, plain: bool) -> Callable[[MemoryPlan], CostModel]:
    """The costs of a model's steps; those of a plain one are of the model of that name, whatever its pools hold."""
    if words.fit:
        from quire.sim.fit import fit_cost_model, measure_engine

        fitted = fit_cost_model(measure_engine())
        return lambda plan: fitted
    if words.prefill_rate is not None or words.decode_ms is not None:
        if words.prefill_rate is None or words.decode_ms is None:
            raise InvalidInput("one of --prefill-rate and --decode-ms is missing.", fix="give both, or a --gpu.")
        given = CostModel.from_flags(prefill_rate=words.prefill_rate, decode_ms=words.decode_ms)
        return lambda plan: given
    model = planned_model(name)
    if model.weights is None:
        raise InvalidInput(f"the weights of {name} cannot be estimated.", fix="give --prefill-rate and --decode-ms.")
    weights, active = model.weights.bytes_on_rank(), _active_parameters(name, model)

    def priced(plan: MemoryPlan) -> CostModel:
        groups = model.spec.groups(plan.page_size) if plain else plan.groups
        return CostModel.from_device(
            words.gpu, model.spec, groups, weight_bytes=weights, active_parameters=active, ranks=words.tp
        )

    return priced


def _active_parameters(name: str, model: PlannedModel) -> int:
    """Parameters that one token goes through: of routed experts, those that are chosen."""
    reader = ConfigReader(read_model_config(name)[0])
    experts = reader.size("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", default=0)
    chosen = reader.size("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", default=experts)
    assert model.weights is not None
    routed = sum(
        part.num_parameters
        for layer in model.weights.layers
        for part in layer.parts
        if part.module in ("experts", "experts_beside")
    )
    return model.weights.num_parameters - (routed - routed * chosen // experts if experts else 0)
