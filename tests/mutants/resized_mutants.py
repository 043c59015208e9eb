"""Mistakes with ids of a pool whose size changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.cache.request_kv import RequestKV
from quire.cache.resizing import Resizing
from quire.cache.room import Room, SharedRoom
from quire.loop.resizing import ResizingPart
from quire.memory.allocator.arena import Arena, EndPool
from quire.memory.allocator.id_pool import IdPool
from quire.spec.ids import Ids
from tests.mutants.mutants import Patch, mutant

NONE: Ids = np.empty(0, dtype=np.int32)


@mutant("resized", "a frame whose memory was given back is handed out again when its request ends")
def an_id_beyond_the_limit_comes_back(patch: Patch) -> None:
    real = IdPool.put

    def put(pool: IdPool, ids: Ids) -> None:
        limit, pool.limit = pool.limit, pool.size
        real(pool, ids)
        pool.limit = limit

    patch.setattr(IdPool, "put", put)


@mutant("resized", "a smaller size stays for good: memory that grows again has no more frames")
def what_was_withdrawn_is_lost(patch: Patch) -> None:
    real = IdPool.resize

    def resize(pool: IdPool, limit: int) -> None:
        pool._withdrawn = NONE
        real(pool, limit)

    patch.setattr(IdPool, "resize", resize)


@mutant("resized", "a frame moves while a transfer reads it")
def a_fixed_frame_moves(patch: Patch) -> None:
    real = IdPool.inwards
    patch.setattr(IdPool, "inwards", lambda pool, fixed, most: real(pool, NONE, most))


@mutant("resized", "a frame moves to a place that is still free, and another request gets the place too")
def a_target_stays_free(patch: Patch) -> None:
    real = IdPool.moved

    def moved(pool: IdPool, sources: Ids, targets: Ids) -> None:
        real(pool, sources, targets)
        pool._set_free(np.concatenate((targets, pool._first(pool._num_ordered))))

    patch.setattr(IdPool, "moved", moved)


@mutant("resized", "an id beyond the limit that a frame has moved to is handed out when the pool grows again")
def a_target_stays_withdrawn(patch: Patch) -> None:
    real = IdPool.moved

    def moved(pool: IdPool, sources: Ids, targets: Ids) -> None:
        real(pool, sources, targets)
        pool._withdrawn = np.concatenate((targets[targets > pool.limit], pool._withdrawn))

    patch.setattr(IdPool, "moved", moved)


@mutant("resized", "places that frames have left are handed out, and their memory is given back at the same time")
def a_source_is_handed_out(patch: Patch) -> None:
    real = IdPool.moved

    def moved(pool: IdPool, sources: Ids, targets: Ids) -> None:
        real(pool, sources, targets)
        if len(sources):
            pool._withdrawn = pool._withdrawn[: -len(sources)]
            pool._set_free(np.concatenate((pool._first(pool._num_ordered), sources)))

    patch.setattr(IdPool, "moved", moved)


@mutant("resized", "all that is free moves to the size before, and frames are handed out that have no memory")
def clear_takes_all(patch: Patch) -> None:
    real = IdPool.clear

    def clear(pool: IdPool) -> None:
        limit, pool.limit = pool.limit, pool.size
        real(pool)
        pool.limit = limit

    patch.setattr(IdPool, "clear", clear)


@mutant("resized", "all frames move at once, and steps wait for it")
def moves_have_no_bound(patch: Patch) -> None:
    real = IdPool.inwards
    patch.setattr(IdPool, "inwards", lambda pool, fixed, most: real(pool, fixed, pool.size))


@mutant("resized", "ids beyond the limit are not counted, and the memory below them is given back")
def none_is_beyond(patch: Patch) -> None:
    patch.setattr(IdPool, "num_beyond", 0)


@mutant("resizes", "memory is given back that a running request still uses")
def what_is_in_use_is_given_back(patch: Patch) -> None:
    patch.setattr(IdPool, "last_present", property(lambda pool: pool.limit))


@mutant("resizes", "memory is given back while a step in flight reads it")
def no_step_is_waited_for(patch: Patch) -> None:
    real = ResizingPart._go_on

    def go_on(part: ResizingPart) -> None:
        loop = part._loop
        assert loop is not None
        loop.drain = lambda: None  # type: ignore[method-assign]
        try:
            real(part)
        finally:
            del loop.drain

    patch.setattr(ResizingPart, "_go_on", go_on)


@mutant("resizes", "a frame moves while a load writes it or a save reads it, when the memory gets smaller")
def frames_of_transfers_move_inwards(patch: Patch) -> None:
    real = Room.inwards

    def inwards(room: Room, most: Sequence[int]) -> Any:
        fixed = room._fixed
        room._fixed = lambda group: None if fixed(group) is None else NONE
        try:
            yield from real(room, most)
        finally:
            room._fixed = fixed

    patch.setattr(Room, "inwards", inwards)


@mutant("resizes", "a request that was accepted waits for ever, since the memory is smaller than it needs")
def what_was_accepted_is_not_kept(patch: Patch) -> None:
    real = Resizing.go_on

    def go_on(resizing: Resizing, running: Sequence[RequestKV], ends: Sequence[int], promised: Sequence[int]) -> bool:
        return real(resizing, running, ends, [0] * len(promised))

    patch.setattr(Resizing, "go_on", go_on)


@mutant("resizes", "frames move inwards and their requests read the old places, when the memory gets smaller")
def moves_are_not_told(patch: Patch) -> None:
    real = Room.inwards

    def inwards(room: Room, most: Sequence[int]) -> Any:
        for move in real(room, most):
            for group in room.groups:
                if group.index == move.group and len(move.sources):
                    group.frames.allocator.ids.moved(move.sources, move.targets)
                    group.moved(move.sources, move.targets)  # type: ignore[attr-defined]
        yield from ()

    patch.setattr(Room, "inwards", inwards)


@mutant("arena", "an upper frame is handed out whose memory was given back")
def closed_places_are_handed_out(patch: Patch) -> None:
    real = EndPool._nearest

    def nearest(pool: EndPool, count: int) -> Any:
        limit, pool.limit = pool.limit, pool.size
        try:
            return real(pool, count)
        finally:
            pool.limit = limit

    patch.setattr(EndPool, "_nearest", nearest)


@mutant("arena", "a group takes the bytes to which the frames beyond the limit were to move")
def nothing_is_kept_for_what_moves_inwards(patch: Patch) -> None:
    patch.setattr(Arena, "reach_of", lambda arena, group: arena.layout.most(group, arena.pools[1 - group].extent))


@mutant("resized arenas", "memory is given back in which the other group's frames still lie")
def the_limit_passes_frames(patch: Patch) -> None:
    patch.setattr(SharedRoom, "_retreats", lambda room, most: iter(()))


@mutant("resized arenas", "a smaller arena promises what it had")
def the_total_stays(patch: Patch) -> None:
    real = SharedRoom.resize

    def resize(room: SharedRoom, limit: int) -> None:
        real(room, limit)
        room.total = room._most

    patch.setattr(SharedRoom, "resize", resize)


@mutant("arena", "a group retreats for a smaller size, with frames that a transfer reads")
def frames_of_transfers_retreat(patch: Patch) -> None:
    real = Arena.retreat
    patch.setattr(
        Arena, "retreat", lambda arena, group, wanted, fixed=(), most=10**6: real(arena, group, wanted, (), most)
    )
