"""Mistakes with ids of a pool whose size changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.cache.request_kv import RequestKV
from quire.cache.resizing import Resizing
from quire.loop.resizing import ResizingPart
from quire.memory.allocator.id_pool import IdPool
from quire.memory.runs import IdArray
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
    real = IdPool.move_inwards
    patch.setattr(IdPool, "move_inwards", lambda pool, fixed, most: real(pool, NONE, most))


@mutant("resized", "a frame moves to a place that is still free, and another request gets the place too")
def a_target_stays_free(patch: Patch) -> None:
    real = IdPool.move_inwards

    def move_inwards(pool: IdPool, fixed: IdArray, most: int) -> tuple[Ids, Ids]:
        sources, targets = real(pool, fixed, most)
        if len(targets):
            pool._set_free(np.concatenate((targets, pool._first(pool._num_ordered))))
        return sources, targets

    patch.setattr(IdPool, "move_inwards", move_inwards)


@mutant("resized", "places that frames have left are handed out, and their memory is given back at the same time")
def a_source_is_handed_out(patch: Patch) -> None:
    real = IdPool.move_inwards

    def move_inwards(pool: IdPool, fixed: IdArray, most: int) -> tuple[Ids, Ids]:
        sources, targets = real(pool, fixed, most)
        if len(sources):
            pool._withdrawn = pool._withdrawn[: -len(sources)]
            pool._set_free(np.concatenate((pool._first(pool._num_ordered), sources)))
        return sources, targets

    patch.setattr(IdPool, "move_inwards", move_inwards)


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
    real = IdPool.move_inwards
    patch.setattr(IdPool, "move_inwards", lambda pool, fixed, most: real(pool, fixed, pool.size))


@mutant("resized", "ids beyond the limit are not counted, and the memory below them is given back")
def none_is_beyond(patch: Patch) -> None:
    patch.setattr(IdPool, "num_beyond", 0)


@mutant("resizes", "memory is given back that a running request still uses")
def what_is_in_use_is_given_back(patch: Patch) -> None:
    patch.setattr(Resizing, "extent", lambda resizing, group: resizing._parts.groups[group].frames.limit)


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
    real = Resizing._retreat
    patch.setattr(Resizing, "_retreat", lambda resizing, group, fixed: real(resizing, group, NONE))


@mutant("resizes", "a request that was accepted waits for ever, since the memory is smaller than it needs")
def what_was_accepted_is_not_kept(patch: Patch) -> None:
    real = Resizing.go_on

    def go_on(resizing: Resizing, running: Sequence[RequestKV], ends: Sequence[int], promised: Sequence[int]) -> bool:
        return real(resizing, running, ends, [0] * len(promised))

    patch.setattr(Resizing, "go_on", go_on)


@mutant("resizes", "frames move inwards and their requests read the old places, when the memory gets smaller")
def moves_are_not_told(patch: Patch) -> None:
    real = Resizing._retreat

    def retreat(resizing: Resizing, group: int, fixed: Ids) -> None:
        moved = resizing._parts.moved
        kept = moved[:]
        moved.clear()
        try:
            real(resizing, group, fixed)
        finally:
            moved.extend(kept)

    patch.setattr(Resizing, "_retreat", retreat)
