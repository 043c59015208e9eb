"""The speeds of an engine, estimated from a device's published peaks."""

from __future__ import annotations

import numpy as np

from quire.cli.plan_request import PlanRequest
from quire.cli.replay import ReplayedEngine
from quire.cli.replay_grid import cost_of
from quire.plan.plan import Plan


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
