"""Statistics of an engine beside those of its loop and its cache, and what never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.counters import gauge
from quire.engine.config import EngineConfig
from quire.models.draft_head import LoadedHead
from quire.models.hf import LoadedModel
from quire.plan.plan import Plan, size_within
from quire.plan.report import plan_as_dict

OPTIONAL_SECTIONS = ("eviction", "tiers", "transfer", "speculation", "hisparse", "cuda_graphs", "canary", "kv_events")
"""Sections of the statistics that are None for an engine without that part."""


@dataclass(kw_only=True)
class EngineCounters:
    """Gauges of an engine beside those of its loop and its cache."""

    weights_epoch: int = gauge("How often the weights were replaced.")
    kv_bytes: int = gauge("Bytes of the KV pools.")
    cache_config: dict[tuple[str, str], int] = gauge(
        "1; the tokens in a page and the pages of the device are labels.",
        *("block_size", "num_gpu_blocks"),
        start=dict,
        name="cache_config_info",
        vllm="cache_config_info",
    )


def facts_of(config: EngineConfig, plan: Plan, models: Sequence[LoadedModel | LoadedHead]) -> dict[str, Any]:
    """Statistics that never change. The first model is the target. `groups` have the frames that the plan has for the
    expected load, and those at the least size of the KV memory. Two groups may share the bytes of an `arena`; that of
    the `upper` frames lies at its end."""
    model, memory = models[0], plan.memory
    arena, least = memory.arena, size_within(plan, config.kv_memory_least or memory.pool_bytes)
    return {
        "plan": plan_as_dict(plan, model=config.model_name),
        "groups": {
            group.name: {
                "planned_frames": frames,
                "least_frames": floor,
                "bytes_per_frame": group.layout.bytes_per_frame,
            }
            for group, frames, floor in zip(memory.groups, memory.split, least.split, strict=True)
        },
        "arena": None if arena is None else {"bytes": arena.room, "upper": memory.groups[arena.upper].name},
        "weight_bytes": sum(each.weight_bytes for each in models),
        "bytes_per_token": float(plan.bytes_per_token),
        "largest_request": memory.largest_request,
        "context": memory.context,
        "max_running_requests": min(config.max_running_requests, memory.max_requests),
        "device": str(model.device),
        "dtype": model.spec.dtype.value,
        "architecture": model.spec.architecture,
    }
