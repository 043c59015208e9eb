"""Mistakes with frames of two groups that share bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.cache.path_ends import PathEnds
from quire.cache.room import SharedRoom
from quire.cache.running import RunningTables
from quire.cache.states import StateGroup
from quire.memory.allocator.arena import Arena, EndPool
from quire.prefix.placement import NodeTiers
from quire.sim import device
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
    patch.setattr(
        EndPool,
        "retreat",
        lambda pool, places, fixed, most: real(pool, max(pool.places_for(pool.num_live), places - 1), fixed, most),
    )


@mutant("arena", "a frame is copied to a place that is still free, and another request gets the place too")
def targets_stay_free(patch: Patch) -> None:
    real = EndPool.moved

    def moved(pool: EndPool, sources: Any, targets: Any) -> None:
        real(pool, sources, targets)
        pool.take_back(targets)
        pool.put(targets)

    patch.setattr(EndPool, "moved", moved)


@mutant("arena", "each retreat loses the ids that it has left for good")
def sources_stay_taken(patch: Patch) -> None:
    real = EndPool.moved

    def moved(pool: EndPool, sources: Any, targets: Any) -> None:
        real(pool, sources, targets)
        pool.num_used += len(sources)

    patch.setattr(EndPool, "moved", moved)


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


def forgets(patch: Patch, name: str) -> None:
    """An array of a group's states keeps the places that frames had before they moved."""
    real = StateGroup.moved

    def moved(group: StateGroup, sources: Any, targets: Any) -> Any:
        before = getattr(group, name).copy()
        pages = real(group, sources, targets)
        getattr(group, name)[:] = before
        return pages

    patch.setattr(StateGroup, "moved", moved)


@mutant("arenas", "a request goes on from the place where its last checkpoint was before it moved")
def a_previous_frame_is_not_told(patch: Patch) -> None:
    forgets(patch, "_previous_frame")


@mutant("arenas with drafts", "states after drafts are written where they were before they moved")
def draft_frames_are_not_told(patch: Patch) -> None:
    forgets(patch, "_draft_frames")


@mutant("arenas", "a checkpoint that is not settled yet is stored from where it was before it moved")
def unsettled_checkpoints_are_not_told(patch: Patch) -> None:
    real = StateGroup.moved

    def moved(group: StateGroup, sources: Any, targets: Any) -> Any:
        before = [[each.frame for each in some] for some in group._unsettled]
        pages = real(group, sources, targets)
        for some, frames in zip(group._unsettled, before, strict=True):
            for each, frame in zip(some, frames, strict=True):
                each.frame = frame
        return pages

    patch.setattr(StateGroup, "moved", moved)


@mutant("arenas", "the bytes of a page are copied while a save reads them or a load writes them")
def frames_in_transfers_move(patch: Patch) -> None:
    real = KVCache._fixed

    def fixed(cache: KVCache, group: int) -> Any:
        cache.parts.fixed.clear()
        return real(cache, group)

    patch.setattr(KVCache, "_fixed", fixed)


@mutant("arenas", "frames are copied before the steps that were launched have written them")
def a_copy_is_not_behind_launched_steps(patch: Patch) -> None:
    real = device._GroupMemory.copy
    patch.setattr(
        device._GroupMemory, "copy", lambda memory, sources, targets, in_flight: real(memory, sources, targets, ())
    )


@mutant("arenas", "each group is promised all of the bytes, and requests are admitted that never fit together")
def rooms_are_counted_apart(patch: Patch) -> None:
    def lack(room: SharedRoom, counts: list[int]) -> int:
        return max(stride * counts[at] - room.total for at, stride in zip(room.indices, room.strides, strict=True))

    patch.setattr(SharedRoom, "lack", lack)


@mutant("arenas", "a request that is alone holds checkpoints in bytes that it needs, and never ends")
def checkpoints_are_never_given_up(patch: Patch) -> None:
    patch.setattr(StateGroup, "give_up", lambda group, lack: False)


@mutant("moved tables", "the device goes on to read pages where they were")
def page_tables_are_not_told(patch: Patch) -> None:
    patch.setattr(RunningTables, "rewritten", lambda rows, group, pages: None)


@mutant("arena", "bytes that are wrong belong to no frame of one group, and to frames of the other")
def a_hole_is_in_one_group(patch: Patch) -> None:
    patch.setattr(ArenaLayout, "under", lambda layout, group, at: range(0))


@mutant("arena", "room is counted as if frames lay side by side, and they lie around a hole")
def holes_take_no_places(patch: Patch) -> None:
    patch.setattr(EndPool, "places_for", lambda pool, count: count)


@mutant("arena", "frames count as moved before they are copied, and a copy that fails loses them")
def ids_change_before_the_copy(patch: Patch) -> None:
    real, moved = Arena.make_way, EndPool.moved

    def make_way(arena: Arena, wanted: Any) -> Any:
        move = real(arena, wanted)
        if move is not None:
            moved(arena.pools[move.group], move.sources, move.targets)
        return move

    patch.setattr(Arena, "make_way", make_way)
    patch.setattr(EndPool, "moved", lambda pool, sources, targets: None)


@mutant("path ends", "pages that no request can begin after outlive others")
def useless_ends_are_worth_something(patch: Patch) -> None:
    real = PathEnds.share
    patch.setattr(PathEnds, "share", lambda ends, pages, first: real(ends, pages, first) or 1.0)


@mutant("path ends", "a leaf loses a page, and its other pages stay without a window")
def a_leaf_keeps_what_is_worth_nothing(patch: Patch) -> None:
    patch.setattr(NodeTiers, "cut", lambda tiers, node, keep, most: keep)


@mutant("path ends", "a leaf whose state was reclaimed is evicted as if it had it")
def lost_ends_are_not_told(patch: Patch) -> None:
    patch.setattr(NodeTiers, "lost", lambda tiers, pages: None)


@mutant("spared", "requests are admitted until nothing is cached")
def nothing_is_spared(patch: Patch) -> None:
    real = SharedRoom.__init__

    def init(room: SharedRoom, *given: Any, **settings: Any) -> None:
        real(room, *given, **settings)
        room.spared = 0

    patch.setattr(SharedRoom, "__init__", init)
