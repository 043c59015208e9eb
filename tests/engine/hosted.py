"""Engines whose latents are in host memory, on the tiny models with sparse attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from quire.engine.core import EngineCore
from quire.models.hf import LoadedModel
from quire.plan.budget import MemoryPlan
from quire.plan.plan import Plan
from quire.spec.hisparse import HotBuffers
from tests.engine.running import core_for

TOP_K = 8


def hosted_core(model: LoadedModel, buffer_size: int, **settings: Any) -> EngineCore:
    """As `core_for`, with hot buffers of that many tokens. Its user closes it."""
    planned = Plan.memory.fget
    assert planned is not None

    def memory(plan: Plan) -> MemoryPlan:
        found: MemoryPlan = planned(plan)
        group = next(at for at, g in enumerate(found.groups) if g.name == "full")
        return replace(found, hot=HotBuffers(group=group, buffer_size=buffer_size, top_k=TOP_K))

    with patch.object(Plan, "memory", property(memory)):
        return core_for(model, **{"max_running_requests": 8, **settings})
