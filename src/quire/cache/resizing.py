"""Resizing: how many frames each group of a cache has, up to those of its plan, while requests run.

    frames  1 ... limit ... num_frames        no frame beyond the limit is handed out
            |-- in use, free --|-- released --|
                               frames that are in use there move to free ones below, or stay until they are freed

A group grows at once. It shrinks in steps: what eviction can free leaves first, in its usual order and to lower tiers
where there are some, then the outermost frames move inwards. What running requests hold, and will need, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.growth import Growth
from quire.cache.offload import CacheParts
from quire.cache.request_kv import RequestKV
from quire.errors import OutOfPages, RequestTooLarge
from quire.memory.allocator import Move
from quire.plan.budget import MemoryPlan, counted, format_bytes
from quire.spec.ids import Ids

MOVED_BYTES = 64 * 2**20
"""Bytes of a group that move at once: steps wait meanwhile."""

_CAUSE = "less KV memory"


class Resizing:
    """The size of one cache: that of `plan`, whose pages the largest request may have, or nothing while it is
    `is_released`. Groups whose frames are in host memory, or in an arena, keep theirs. `fixed` are frames of a group
    that must not move now, None: all of them."""

    def __init__(self, parts: CacheParts, growth: Growth, fixed: Callable[[int], Ids | None]) -> None:
        self._parts = parts
        self._growth = growth
        self._fixed = fixed
        self._sized = tuple(
            group for group in parts.groups if not group.frames.are_page_ids and not group.room.is_shared
        )
        self.plan = parts.plan
        self.is_released = False

    @property
    def goal(self) -> Sequence[int]:
        """The frames of each group that were asked for."""
        return (0,) * len(self.plan.groups) if self.is_released else self.plan.split

    @property
    def why_nothing_fits(self) -> str:
        """Why no request begins at all; "" if some may."""
        return "the KV memory is released, until POST /v1/cache/memory/resume" if self.is_released else ""

    @property
    def reached(self) -> bool:
        """Whether each group has the frames of the goal, and uses none beyond."""
        pools = [(group.frames.allocator.ids, self.goal[group.index]) for group in self._sized]
        return all(ids.limit <= goal and not ids.num_beyond for ids, goal in pools)

    @property
    def is_shrinking(self) -> bool:
        """Whether requests wait because memory is released, or because what others hold of it leaves."""
        return self.is_released or any(group.room.leaving for group in self._sized)

    @property
    def num_evicted(self) -> int:
        """Pages that have left the device since the start, for more room or for less memory."""
        return self._growth.num_left

    @property
    def num_bytes(self) -> int:
        """Bytes of the device's pools now."""
        plan = self._parts.plan
        gone = (
            (group.frames.num_frames - self.extent(group.index)) * plan.groups[group.index].layout.bytes_per_frame
            for group in self._sized
        )
        return plan.pool_bytes - sum(gone)

    def extent(self, group: int) -> int:
        """The last frame of a group that has to have memory."""
        return self._parts.groups[group].frames.allocator.ids.last_present

    def check(self, prompt: int, max_tokens: int) -> None:
        """Refuse a request that can never run at this size. Raises what `MemoryPlan.check_request` raises."""
        most, now = self._parts.plan, self.plan
        most.check_request(prompt, max_tokens)
        if (need := now.pages_of(prompt + max_tokens)) > now.num_pages:
            raise RequestTooLarge(
                f"{counted(prompt, 'prompt token')} and {counted(max_tokens, 'output token')} need "
                f"{counted(need, 'page')} of {counted(now.tokens_per_page, 'token')}; the KV memory is smaller now "
                f"and has {now.num_pages:,} in {format_bytes(now.pool_bytes)}, of {most.num_pages:,} in "
                f"{format_bytes(most.pool_bytes)}.",
                fix=f"ask for at most {now.largest_request:,} tokens, or have the memory grow: quire memory --resize.",
            )

    def aim(self, plan: MemoryPlan, *, released: bool = False) -> None:
        """Have the frames of `plan`, which is that of the cache with fewer ones, or none while `released`. `go_on`
        gets there."""
        self.plan, self.is_released = plan, released
        for listener in self._parts.resized:
            listener(plan)

    def go_on(self, running: Sequence[RequestKV], ends: Sequence[int], promised: Sequence[int]) -> bool:
        """Go on towards the goal, as far as `running` requests allow, which will have `ends[i]` pages at their end, and
        the `promised` frames of each group, which a request needs that was accepted before. No step may be in flight.
        At most `MOVED_BYTES` of a group move. Returns whether it is reached but for that promise and for moves."""
        rows = self._parts.rows.distinct(running)
        have = -(-self._parts.rows.num_allocated[rows] // self._parts.plan.page_size)
        reached = np.maximum(have, np.array(ends, dtype=np.int64))
        least, reserved = [group.frames.limit for group in self._parts.groups], [0] * len(self.goal)
        for group in self._sized:
            index, ids = group.index, group.frames.allocator.ids
            least[index] = min(ids.size, max(self.goal[index], promised[index]))
            reserved[index] = int(group.remaining(rows, have, reached).sum())
            if least[index] > ids.limit:
                ids.resize(least[index])
        self._evict(least, reserved)
        for group in self._sized:
            index, ids = group.index, group.frames.allocator.ids
            limit = min(ids.limit, group.extent_for(least[index], reserved[index]))
            if limit < ids.limit:
                ids.resize(limit)
            group.give_up_apart(ids.limit)
            if ids.num_beyond and (fixed := self._fixed(index)) is not None:
                self._retreat(index, fixed)
            group.room.resized(ids.limit - least[index])
        self._growth.resized()
        self._parts.changed()
        return all(group.frames.limit <= least[group.index] for group in self._sized)

    def _evict(self, least: Sequence[int], reserved: Sequence[int]) -> None:
        """Evict until the groups can have `least` frames, with `reserved` ones for those that run; if that is too few,
        until they have no more than these need."""
        for _ in range(2):
            limits = [group.frames.limit for group in self._parts.groups]
            wanted = [(now - n + more) * (now > n) for now, n, more in zip(limits, least, reserved, strict=True)]
            try:
                self._growth.reclaim(wanted, _CAUSE)
                return
            except OutOfPages:
                held = [group.num_held + more for group, more in zip(self._parts.groups, reserved, strict=True)]
                least = [min(now, max(n, own)) for now, n, own in zip(limits, least, held, strict=True)]

    def _retreat(self, group: int, fixed: Ids) -> None:
        most = max(1, MOVED_BYTES // self._parts.plan.groups[group].layout.bytes_per_frame)
        sources, targets = self._parts.groups[group].frames.allocator.ids.move_inwards(fixed, most)
        if len(sources):
            self._growth.move(Move(group, sources, targets))
