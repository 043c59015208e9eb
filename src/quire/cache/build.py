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
    size, rows, drafts = plan.page_size, plan.max_requests, plan.tokens_per_step - 1
    groups: list[GroupCache] = []
    for index, group in enumerate(plan.groups):
        num_frames, column, reach = plan.frames_of(index), table.of(Tier.DEVICE, index), reach_of(group.reach, size)
        if reach.carried:
            own = carried_frames(column, num_frames)
            groups.append(
                CarriedGroup(index, reach, own, tree, page_size=size, max_requests=rows, grid=grid, drafts=drafts)
            )
        elif reach.whole:
            groups.append(WholeGroup(index, reach, whole_frames(column, num_frames, pages), tree))
        else:
            groups.append(PassingGroup(index, reach, passing_frames(column, num_frames, pages), tree, rows))
    return tuple(groups)
