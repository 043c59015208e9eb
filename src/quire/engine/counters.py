"""Statistics of an engine beside those of its loop and its cache, and what never changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.counters import gauge
from quire.engine.config import EngineConfig
from quire.models.draft_head import LoadedHead
from quire.models.hf import LoadedModel
from quire.plan.plan import Plan
from quire.plan.report import plan_as_dict

OPTIONAL_SECTIONS = ("eviction", "tiers", "transfer", "speculation", "hisparse", "cuda_graphs", "canary")
"""Sections of the statistics that are None for an engine without that part."""


@dataclass(kw_only=True)
class EngineCounters:
    """Gauges of an engine beside those of its loop and its cache."""

    weights_epoch: int = gauge("How often the weights were replaced.")
    kv_bytes: int = gauge("Bytes of the KV pools.")


def facts_of(
    config: EngineConfig, plan: Plan, model: LoadedModel, draft: LoadedModel | LoadedHead | None
) -> dict[str, Any]:
    """Statistics that never change."""
    return {
        "plan": plan_as_dict(plan, model=config.model_name),
        "weight_bytes": model.weight_bytes + (draft.weight_bytes if draft is not None else 0),
        "bytes_per_token": float(plan.bytes_per_token),
        "largest_request": plan.memory.largest_request,
        "context": plan.memory.context,
        "max_running_requests": min(config.max_running_requests, plan.memory.max_requests),
        "device": str(model.device),
        "dtype": model.spec.dtype.value,
        "architecture": model.spec.architecture,
    }
