"""The pools of an engine at another size of its KV memory: the same plan, with fewer tokens."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from quire.errors import PlanError
from quire.plan.budget import MemoryPlan, format_bytes, round_up_bytes
from quire.plan.plan import Plan


def size_within(plan: Plan, num_bytes: int) -> MemoryPlan:
    """The plan of the most tokens whose pools on the device take at most `num_bytes`, and no more than `plan` has.
    Requests, hot buffers and latents in host memory stay as they are. Raises PlanError if that is less than a page."""
    step, whole = plan.tokens_per_page, plan.memory
    if num_bytes >= whole.pool_bytes:
        return whole
    most = plan.config.max_total_num_tokens // step

    def size(pages: int) -> int:
        try:
            return _sized(plan, pages * step).pool_bytes
        except PlanError:  # too few for the largest window, so that more are needed
            return 0

    found = bisect_right(range(1, most), num_bytes, key=size)
    if not found:
        least = _sized(plan, step)
        pools = ", ".join(
            f"{group.name} {format_bytes((least.device_frames_of(index) + 1) * group.layout.bytes_per_frame)}"
            for index, group in enumerate(least.groups)
        )
        raise PlanError(
            f"{format_bytes(num_bytes)} of KV memory cannot hold one page of {step:,} tokens: the smallest pools take "
            f"{format_bytes(least.pool_bytes)} ({pools}), each with a padding frame.",
            fix=f"give at least {round_up_bytes(least.pool_bytes)}.",
        )
    return _sized(plan, found * step)


def _sized(plan: Plan, tokens: int) -> MemoryPlan:
    solve, whole = plan.configurator.calculate_pool_sizes_from_max_tokens, plan.memory
    config = solve(tokens, plan.page_size, available_bytes=plan.kv_bytes)
    found = replace(plan, config=config, stages=(config,)).split
    frames = [min(pair) for pair in zip(found.frames, whole.frames, strict=True)]
    for index in whole.groups_on_host:
        frames[index] = whole.frames[index]
    num_pages = min(found.num_pages, whole.num_pages)
    return replace(found, frames=tuple(frames), num_pages=num_pages, max_requests=whole.max_requests)
