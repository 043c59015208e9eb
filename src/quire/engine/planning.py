"""The plan of an engine, from its settings: before its weights are loaded, and after. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.engine.config import EngineConfig
from quire.engine.host_memory import host_memory
from quire.errors import UnsupportedModel
from quire.plan.budget import MemoryPlan
from quire.plan.hisparse import latent_bytes
from quire.plan.plan import Plan
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.plan.speculation import configured_draft, with_draft_model
from quire.plan.step_cost import growth_of
from quire.spec.config_reader import ConfigReader
from quire.spec.layout import DType
from quire.spec.model import ModelSpec
from quire.spec.weights import active_parameters, read_weights

if TYPE_CHECKING:
    from quire.models.hf import LoadedModel


def plan_settings(config: EngineConfig) -> PlanSettings:
    """The settings of an engine that planning needs.

    Latents in host memory may take `--host-memory`, or half of what is available; with tiers half of that, because
    pages that have left the device have latents too.
    """
    hosted = latent_bytes(config.hisparse, config.host_memory, host_memory(), owners=1 + config.has_tiers)
    return PlanSettings(**config.shared(PlanSettings), latent_bytes=hosted)


def engine_plan(
    config: EngineConfig, spec: ModelSpec, drafts: Sequence[ModelSpec], kv_memory: int, **beside: int
) -> Plan:
    """The plan of an engine for a model and its draft, if it has one. `beside` are bytes of the device that it uses
    beside the pools, by their names in `PlanSettings`. Raises PlanError, InvalidInput or UnsupportedModel."""
    settings = plan_settings(config).changed(kv_memory=kv_memory, **beside)
    for draft in drafts:
        spec, settings = with_draft_model(spec, settings, draft)
    return make_plan(spec, settings)


def configured_plan(config: EngineConfig, found: Mapping[str, Any], kv_memory: int) -> Plan:
    """The plan as far as the model's configuration, `found`, and its draft's determine it. Raises what `engine_plan`
    raises, and ModelLoadError."""
    spec = ModelSpec.from_config(found)
    if config.dtype != "auto":
        spec = replace(spec, dtype=DType(config.dtype))
    return engine_plan(config, spec, configured_draft(config.speculative_config, spec), kv_memory)


def memory_plan(config: EngineConfig, plan: Plan) -> MemoryPlan:
    """What the pools and tiers of an engine are built from. An engine that sends pages has windows of requests that run
    in host memory: so the host has the device's mix then."""
    return replace(plan.memory, at_rest=()) if config.sends_pages else plan.memory


def cost_growth(config: EngineConfig, model: LoadedModel) -> float:
    """As `CostModel.growth`, by the floating-point operations of a model; 0 with `eviction_worth` tokens. A model whose
    experts are not described uses all of its parameters for each token."""
    if config.eviction_worth == "tokens":
        return 0.0
    try:
        reader = ConfigReader(model.config)
        active = active_parameters(reader, read_weights(reader))
    except UnsupportedModel:
        active = model.num_parameters
    return growth_of(model.spec, active)
