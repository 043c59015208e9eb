"""Resizing: the size of each room of a cache (`quire.cache.room`), up to that of its plan, while requests run.

A room grows at once. It shrinks in steps: what eviction can free leaves first, in its usual order and to lower tiers
where there are some, then the outermost frames move inwards. What running requests hold, and will need, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from quire.cache.growth import Growth
from quire.cache.offload import CacheParts
from quire.cache.request_kv import RequestKV
from quire.cache.room import Room
from quire.errors import OutOfPages, RequestTooLarge
from quire.plan.budget import MemoryPlan, counted, format_bytes

MOVED_BYTES = 64 * 2**20
"""Bytes of a group that move at once: steps wait meanwhile."""

_CAUSE = "less KV memory"


class Resizing:
    """The size of one cache: that of `plan`, whose pages the largest request may have, or nothing while it is
    `is_released`. Groups whose frames are in host memory keep theirs."""

    def __init__(self, parts: CacheParts, growth: Growth) -> None:
        self._parts = parts
        self._growth = growth
        self._rooms = tuple(room for room in parts.rooms if not room.outer.frames.are_page_ids)
        self.provide: Callable[[Mapping[int, int]], None] = lambda gone: None
        """Called before frames may lie anywhere but in the last `gone[group]` bytes of the memory of each group."""
        self.plan = parts.plan
        self.is_released = False

    @property
    def why_nothing_fits(self) -> str:
        """Why no request begins at all; "" if some may."""
        return "the KV memory is released, until POST /v1/cache/memory/resume" if self.is_released else ""

    @property
    def reached(self) -> bool:
        """Whether each room has the size that was asked for, and uses no frames beyond."""
        return all(room.limit <= self._goal(room) and not room.ids.num_beyond for room in self._rooms)

    @property
    def is_shrinking(self) -> bool:
        """Whether requests wait because memory is released, or because what others hold of it leaves."""
        return self.is_released or any(room.leaving for room in self._rooms)

    @property
    def num_evicted(self) -> int:
        """Pages that have left the device since the start, for more room or for less memory."""
        return self._growth.num_left

    @property
    def num_bytes(self) -> int:
        """Bytes of the device's pools now."""
        return self._parts.plan.pool_bytes - sum(self.released().values())

    def released(self) -> dict[int, int]:
        """How many bytes at the end of the memory no frame needs, by the group whose frames lie there."""
        return {room.outer.index: self._beyond(room, room.ids.last_present) for room in self._rooms}

    def _beyond(self, room: Room, last: int) -> int:
        return (room.ids.size - last) * self._parts.plan.groups[room.outer.index].layout.bytes_per_frame

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
        """Have the frames of `plan`, that of the cache with fewer ones, or none while `released`, by `go_on`."""
        self.plan, self.is_released = plan, released
        for listener in self._parts.resized:
            listener(plan)

    def go_on(self, running: Sequence[RequestKV], ends: Sequence[int], promised: Sequence[int]) -> bool:
        """Go on towards the goal, as far as `running` requests allow, which will have `ends[i]` pages at their end, and
        the `promised` units of each room, which a request needs that was accepted before. No step may be in flight.
        At most `MOVED_BYTES` of a group move. Returns whether it is reached but for that promise and for moves."""
        rows, groups = self._parts.rows.distinct(running), self._parts.groups
        have = -(-self._parts.rows.num_allocated[rows] // self._parts.plan.page_size)
        reached = np.maximum(have, np.array(ends, dtype=np.int64))
        before = {room: room.limit for room in self._rooms}
        sized = zip(self._parts.rooms, promised, strict=True)
        asked = {room: max(self._goal(room), room.limit_for(units)) for room, units in sized if room in before}
        self.provide({room.outer.index: self._beyond(room, limit) for room, limit in asked.items()})
        for room, limit in asked.items():
            room.asked = limit
            room.resize(limit)
        smaller = {room for room, limit in before.items() if room.limit < limit}
        reserved = [int(group.remaining(rows, have, reached).sum()) * (group.room in smaller) for group in groups]
        done = self._evict(before, reserved)
        most = [max(1, MOVED_BYTES // group.layout.bytes_per_frame) for group in self._parts.plan.groups]
        for room in self._rooms:
            for move in room.inwards(most):
                with suppress(OutOfPages):  # no memory to copy with: the frames stay, and a later call tries again
                    self._growth.move(move)
        self._growth.resized()
        self._parts.changed()
        return done

    def _goal(self, room: Room) -> int:
        return room.limit_for(0 if self.is_released else room.size_in(self.plan))

    def _evict(self, before: Mapping[Room, int], reserved: Sequence[int]) -> bool:
        """Evict until what is in use fits into the rooms, with `reserved` frames for those that run. Where that is too
        little, a room has what is held needs, and at most what it had `before`. Returns whether it was not."""
        done, groups = True, self._parts.groups
        for _ in range(2):
            try:
                self._growth.shrink(reserved, _CAUSE)
                break
            except OutOfPages:
                held = [group.num_held + more for group, more in zip(groups, reserved, strict=True)]
                done = done and all(room.lack(held, settled=True) <= 0 for room in self._rooms)
                self._fit(before, held)
        self._fit(before, [group.frames.num_used + more for group, more in zip(groups, reserved, strict=True)])
        return done

    def _fit(self, before: Mapping[Room, int], counts: Sequence[int]) -> None:
        for room, most in before.items():
            while (lack := room.lack(counts)) > 0 and room.limit < most:
                room.resize(min(most, room.limit_for(room.total + lack)))
