"""The groups of a cache, from a plan: which of the three behaviours each has follows from its reach."""

from __future__ import annotations

from quire.cache.carried import CarriedGroup
from quire.cache.groups import GroupCache, PassingGroup, WholeGroup
from quire.memory.allocator import BaseTokenToKVPoolAllocator, carried_frames, passing_frames, whole_frames
from quire.memory.residency import Residency
from quire.plan.budget import MemoryPlan
from quire.prefix.radix_cache import RadixCache
from quire.prefix.reach import reach_of
from quire.spec.ids import Tier


def build_groups(
    plan: MemoryPlan, table: Residency, pages: BaseTokenToKVPoolAllocator, tree: RadixCache, grid: int
) -> tuple[GroupCache, ...]:
    """One for each group of the plan, all frames free. `pages` hands out page ids; `grid` is in tokens."""
    return tuple(_group(plan, index, table, pages, tree, grid) for index in range(len(plan.groups)))


def _group(
    plan: MemoryPlan, index: int, table: Residency, pages: BaseTokenToKVPoolAllocator, tree: RadixCache, grid: int
) -> GroupCache:
    num_frames, column = plan.frames_of(index), table.of(Tier.DEVICE, index)
    reach = reach_of(plan.groups[index].reach, plan.page_size)
    if reach.carried:
        size, rows = plan.page_size, plan.max_requests
        frames = carried_frames(column, num_frames)
        drafts = plan.tokens_per_step - 1
        return CarriedGroup(index, reach, frames, tree, page_size=size, max_requests=rows, grid=grid, drafts=drafts)
    if reach.whole:
        return WholeGroup(index, reach, whole_frames(column, num_frames, pages), tree)
    return PassingGroup(index, reach, passing_frames(column, num_frames, pages), tree, plan.max_requests)
