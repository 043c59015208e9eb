"""Mistakes with frames of two groups that share bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.memory.allocator.arena import Arena, EndPool
from quire.spec.arena import ArenaLayout
from tests.mutants.mutants import Patch, mutant


@mutant("arena", "the outermost frames of both groups have the same bytes")
def a_frame_too_many(patch: Patch) -> None:
    real = ArenaLayout.room
    patch.setattr(ArenaLayout, "room", property(lambda layout: real.__get__(layout) + max(layout.strides)))


@mutant("arena", "what both groups have free is added, and bytes are promised twice")
def availability_is_added(patch: Patch) -> None:
    def lack(arena: Arena, counts: list[int]) -> int:
        beyond = [n - pool.num_used - pool.num_free for n, pool in zip(counts, arena.pools, strict=True)]
        return max(beyond)

    patch.setattr(Arena, "lack", lack)


@mutant("arena", "a group retreats further than its neighbour needs, over frames that must not move")
def a_retreat_goes_too_far(patch: Patch) -> None:
    real = EndPool.retreat
    patch.setattr(EndPool, "retreat", lambda pool, limit: real(pool, max(pool.num_used, limit - 1)))


@mutant("arena", "a frame is copied to a place that is still free, and another request gets the place too")
def targets_stay_free(patch: Patch) -> None:
    real = EndPool.retreat

    def retreat(pool: EndPool, limit: int) -> Any:
        sources, targets = real(pool, limit)
        pool.take_back(targets)
        pool.put(targets)
        return sources, targets

    patch.setattr(EndPool, "retreat", retreat)


@mutant("arena", "each retreat loses the ids that it has left for good")
def sources_stay_taken(patch: Patch) -> None:
    real = EndPool.retreat

    def retreat(pool: EndPool, limit: int) -> Any:
        sources, targets = real(pool, limit)
        pool._num_used += len(sources)
        return sources, targets

    patch.setattr(EndPool, "retreat", retreat)


@mutant("arena", "ids that are free again further in are not found, and a group with room moves instead")
def holes_are_forgotten(patch: Patch) -> None:
    real = EndPool._nearest

    def nearest(pool: EndPool, count: int) -> Any:
        pool._first_free = max(pool._first_free, pool.extent - 1)
        return real(pool, count)

    patch.setattr(EndPool, "_nearest", nearest)


@mutant("arena", "the end of a group is not seen to come back, and its neighbour never gets the bytes")
def an_extent_only_grows(patch: Patch) -> None:
    real = EndPool._vacate

    def vacate(pool: EndPool, places: Any) -> None:
        extent = pool.extent
        real(pool, places)
        pool.extent = max(pool.extent, extent if np.count_nonzero(pool._used) else 0)

    patch.setattr(EndPool, "_vacate", vacate)
