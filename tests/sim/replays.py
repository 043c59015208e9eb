"""Replays in small pools, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quire.plan.step_cost import CostModel
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.result import ReplayResult
from quire.sim.trace import TraceRequest
from quire.spec.group import ReachSpec
from quire.spec.speculation import SpeculativeConfig
from quire.testing import small_plan

COST = CostModel.from_flags(prefill_rate=20_000, decode_ms=5, key_ns=10)
SLOW = CostModel.from_flags(prefill_rate=500, decode_ms=50)

HYBRIDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"groups": ("full", "window"), "reaches": (ReachSpec(), ReachSpec("window", 24))},
    "chunk": {"groups": ("full", "chunk"), "reaches": (ReachSpec(), ReachSpec("chunk", 32))},
    "state": {"groups": ("full", "state"), "reaches": (ReachSpec(), ReachSpec("state"))},
}
"""Groups of a small plan, by name."""


def replay_of(
    num_pages: int = 64,
    page_size: int = 4,
    *,
    cost: CostModel = COST,
    context: int = 0,
    max_running: int = 8,
    groups: str = "full",
    frames: tuple[int, ...] = (),
    speculation: SpeculativeConfig | None = None,
    **settings: Any,
) -> Replay:
    """A replay that checks everything, unless told otherwise."""
    plan = small_plan(num_pages, page_size, context=context, max_requests=max_running, frames=frames, **HYBRIDS[groups])
    plan = replace(plan, speculation=speculation)
    return Replay(plan, cost, ReplaySettings(**{"check": "all", "chunk": 16} | settings))


def run(trace: Iterable[TraceRequest], **settings: Any) -> ReplayResult:
    """The result of such a replay."""
    return replay_of(**settings).run(trace)


def requests(
    lengths: Sequence[tuple[int, int]], *, seed: int = 0, shared: int = 0, gap: float = 0.0, **more: Any
) -> list[TraceRequest]:
    """Requests of these prompt and output lengths that begin with the same `shared` tokens, `gap` seconds apart."""
    random = np.random.default_rng(seed)
    opening = random.integers(1000, size=shared, dtype=np.int32)
    return [
        TraceRequest(
            request_id=f"r{index}",
            prompt=np.concatenate((opening, random.integers(1000, size=prompt - shared, dtype=np.int32))),
            output=random.integers(1000, size=output, dtype=np.int32),
            arrival=index * gap,
            **more,
        )
        for index, (prompt, output) in enumerate(lengths)
    ]
