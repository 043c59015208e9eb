"""Small plans with any combination of reaches, in pools so small that frames are always short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.plan.budget import MemoryPlan
from quire.prefix.reach import reach_of
from quire.spec.arena import ArenaLayout
from quire.spec.group import ReachSpec
from quire.spec.hisparse import HotBuffers
from quire.spec.ids import Ids
from quire.spec.layout import DType, Field, PageLayout
from quire.spec.speculation import SpeculativeConfig, get_alloc_reserve_per_decode
from quire.testing.choices import Choices
from quire.testing.plans import small_plan

COMBINATIONS = (
    ("full",),
    ("full", "full"),
    ("full", "window"),
    ("full", "state"),
    ("full", "window", "state"),
    ("full", "full", "chunk", "window", "state"),
    ("full", "chunk"),
    ("window",),
    ("state",),
    ("window", "state"),
)
FEW = 6  # frames beyond the least that works


def hybrid_plan(choices: Choices, num_pages: int, page_size: int, context: int, max_requests: int) -> MemoryPlan:
    """Groups of one of `COMBINATIONS`; those read in part have few frames, at least what one request needs."""
    reaches = [reach(choices, kind, page_size) for kind in choices.one_of(COMBINATIONS)]
    frames = []
    for spec in reaches:
        least = reach_of(spec, page_size).held(num_pages)
        scarce = min(num_pages, least + choices.below(FEW)) if spec.kind != "full" else num_pages
        frames.append(max(scarce, 1))
    plan = small_plan(
        num_pages,
        page_size,
        context=context,
        max_requests=max_requests,
        groups=tuple(f"{spec.kind}{index}" for index, spec in enumerate(reaches)),
        reaches=tuple(reaches),
        frames=tuple(frames),
    )
    whole = [index for index, spec in enumerate(reaches) if spec.kind == "full"]
    if len(whole) == 1 and len(reaches) == 2:
        return with_arena(plan) if context % 4 else plan
    if len(whole) < 2 or context % 4 == 0:
        return plan
    return replace(plan, hot=HotBuffers(group=whole[context % 2], buffer_size=page_size, top_k=1))


def with_arena(plan: MemoryPlan) -> MemoryPlan:
    """The plan with one budget for its two groups, of as many bytes; frames of the second one are larger or not."""
    wide = Field(name="k", shape=(1 + plan.context % 5,), dtype=DType.UINT8, layers=(0,))
    second = replace(plan.groups[1], layout=PageLayout(plan.page_size, (wide,)))
    groups = (plan.groups[0], second)
    one, two = (group.layout.bytes_per_frame for group in groups)
    budget = (plan.num_pages + 2) * one + (plan.frames[1] + 1) * two
    return replace(plan, groups=groups, arena=ArenaLayout(budget, (one, two)))


def drafting_plan(plan: MemoryPlan, num_drafts: int, *, branches: bool) -> MemoryPlan:
    """The plan with room for so many drafts of each request, which branch where every group has pages. States are as
    many as the planner adds, one for each token that a step verifies; of an odd number of drafts, for one request."""
    branches = branches and all(group.reach.kind in ("full", "window") for group in plan.groups)
    topk = 2 if branches else 1
    speculation = SpeculativeConfig(
        method="ngram", num_steps=num_drafts, topk=topk, num_draft_tokens=topk * num_drafts + 1
    )

    def states(frames: int) -> int:
        return frames + num_drafts if num_drafts % 2 else frames * (2 + num_drafts)

    more = -(-get_alloc_reserve_per_decode(speculation, plan.page_size) // plan.page_size)
    plan, had_arena = replace(plan, arena=None), plan.arena is not None
    frames = [
        states(plan.frames_of(at)) if group.reach.kind == "state" else plan.frames_of(at) + more
        for at, group in enumerate(plan.groups)
    ]
    plan = replace(plan, speculation=speculation, num_pages=plan.num_pages + more, frames=tuple(frames))
    return with_arena(plan) if had_arena else plan


def reach(choices: Choices, kind: str, page_size: int) -> ReachSpec:
    """A reach of that kind; windows and chunks are around a page and up to four of them."""
    if kind in ("full", "state"):
        return ReachSpec(kind)
    around = (page_size - 1, page_size, page_size + 1, 4 * page_size, choices.between(1, 3 * page_size))
    return ReachSpec(kind, max(1, choices.one_of(around)))


def tokens_read(spec: ReachSpec, page_size: int) -> Callable[[int], int]:
    """From a position to the first earlier token that a token there reads, by the definition of each kind.

    A state is read as a whole, and is there where its last token's page has it.
    """
    return {
        "full": lambda position: 0,
        "window": lambda position: max(0, position - spec.tokens + 1),
        "chunk": lambda position: position // spec.tokens * spec.tokens,
        "state": lambda position: max(0, position - page_size),
    }[spec.kind]


def shuffle_frames(cache: KVCache, choices: Choices) -> None:
    """Give frames back in any order, so that a page's id and those of its frames differ."""
    for group in cache.groups:
        allocator: Any = group.frames.allocator
        if group.reach.in_place:
            take, free = allocator.alloc, allocator.free
        else:
            take, free = allocator.alloc_pages, allocator.free_pages
        frames: Ids = take(group.num_free)
        left = frames.tolist()
        free(np.array([left.pop(choices.below(len(left))) for _ in frames], dtype=np.int32))
