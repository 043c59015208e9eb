"""The plan of an engine, from its settings: before its weights are loaded, and after. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.config import EngineConfig
from quire.engine.host_memory import host_memory
from quire.plan.host import host_budget
from quire.plan.plan import Plan
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.plan.source import read_model_config
from quire.plan.speculation import head_spec, with_draft_model
from quire.spec.layout import DType
from quire.spec.model import ModelSpec


def plan_settings(config: EngineConfig) -> PlanSettings:
    """The settings of an engine that planning needs.

    Latents in host memory may take `--host-memory`, or half of what is available; with tiers half of that, because
    pages that have left the device have latents too.
    """
    hosted = None
    if config.hisparse is not None:
        memory, asked = host_memory(), config.host_memory if config.host_memory is not None else "auto"
        budget = host_budget(
            asked,
            available=memory.available,
            limit=memory.limit,
            total=memory.total,
            device_bytes=memory.available,
        )
        hosted = budget // (2 if config.has_tiers else 1)
    return PlanSettings(**config.shared(PlanSettings), latent_bytes=hosted)


def engine_plan(config: EngineConfig, spec: ModelSpec, draft: ModelSpec | None, kv_memory: int, **beside: int) -> Plan:
    """The plan of an engine for a model and its draft. `beside` are bytes of the device that it uses beside the pools,
    by their names in `PlanSettings`. Raises PlanError, InvalidInput or UnsupportedModel."""
    settings = plan_settings(config).changed(kv_memory=kv_memory, **beside)
    if draft is not None:
        spec, settings = with_draft_model(spec, settings, draft)
    return make_plan(spec, settings)


def configured_plan(config: EngineConfig, found: Mapping[str, Any], kv_memory: int) -> Plan:
    """The plan as far as the model's configuration, `found`, and its draft's determine it. Raises what `engine_plan`
    raises, and ModelLoadError."""
    spec = ModelSpec.from_config(found)
    if config.dtype != "auto":
        spec = replace(spec, dtype=DType(config.dtype))
    return engine_plan(config, spec, configured_draft(config, spec), kv_memory)


def configured_draft(config: EngineConfig, target: ModelSpec) -> ModelSpec | None:
    """The draft model or head of an engine, by its configuration; None if it has none of its own."""
    speculation = config.speculative_config
    if speculation is None or speculation.model is None:
        return None
    found = read_model_config(speculation.model, speculation.revision)[0]
    return ModelSpec.from_config(found) if speculation.method == "draft_model" else head_spec(found, target)
