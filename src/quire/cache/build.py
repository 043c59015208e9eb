"""The groups of a cache, from a plan: which of the three behaviours each has follows from its reach."""

from __future__ import annotations

from quire.cache.carried import CarriedGroup
from quire.cache.groups import GroupCache, PassingGroup, WholeGroup
from quire.memory.allocator import BaseTokenToKVPoolAllocator, carried_frames, passing_frames, whole_frames
from quire.memory.frames import FrameTable
from quire.plan.budget import MemoryPlan
from quire.prefix.radix_cache import RadixCache
from quire.prefix.reach import reach_of


def build_groups(
    plan: MemoryPlan, table: FrameTable, pages: BaseTokenToKVPoolAllocator, tree: RadixCache, grid: int
) -> tuple[GroupCache, ...]:
    """One for each group of the plan, all frames free. `pages` hands out page ids; `grid` is in tokens."""
    return tuple(_group(plan, index, table, pages, tree, grid) for index in range(len(plan.groups)))


def _group(
    plan: MemoryPlan, index: int, table: FrameTable, pages: BaseTokenToKVPoolAllocator, tree: RadixCache, grid: int
) -> GroupCache:
    name, num_frames = plan.groups[index].name, plan.frames_of(index)
    reach = reach_of(plan.groups[index].reach, plan.page_size)
    if reach.carried:
        frames = carried_frames(table, index, num_frames, name)
        size, rows = plan.page_size, plan.max_requests
        return CarriedGroup(index, reach, frames, page_size=size, max_requests=rows, grid=grid)
    if reach.whole:
        return WholeGroup(index, reach, whole_frames(table, index, num_frames, pages, name), tree)
    return PassingGroup(index, reach, passing_frames(table, index, num_frames, pages, name), tree, plan.max_requests)
