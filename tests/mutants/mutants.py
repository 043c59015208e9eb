"""Mistakes that engines of this kind have shipped, each as a change to the real code. Every one must be noticed.

A mutant is a function that breaks something, a sentence that says what goes wrong for a user, and the check that has to
fail: the stateful check of the cache, of the allocators, of windows, of states, of stored rows, of the scheduler, of
its steps, of kept plans, the table of eviction orders, or the second planner. Add one when a bug was found that no
check had seen.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.fields import PagedField, SlotIndex, _bytes_of, _Rows
from quire.memory import residency
from quire.memory.allocator import (
    BaseTokenToKVPoolAllocator,
    MambaSlotAllocator,
    PagedTokenToKVPoolAllocator,
    PageFrames,
    SWATokenToKVPoolAllocator,
)
from quire.memory.allocator.base import TokenSlots
from quire.memory.allocator.id_pool import IdPool
from quire.memory.residency import Column
from quire.offload.offloading import Tiered
from quire.plan import configurator
from quire.plan.configurator import HybridSWAPoolConfigurator, MemoryPoolConfigurator, PoolRule
from quire.prefix.radix_cache import RadixCache
from quire.spec import layers
from quire.spec.kv_format import KVFormat
from quire.spec.layers import AttentionCall, LatentCall, StateCall
from quire.spec.model import ModelSpec
from quire.tiers.break_even import BreakEven, _Trial
from quire.tiers.mover import Mover, ThreadMover
from quire.tiers.transfer import Endpoint, Lane, Transfer
from quire.tiers.virtual_mover import VirtualMover

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """`wrong` is what the mistake does to a user; `killer` names the check that must notice it."""

    apply: Callable[[Patch], None]
    wrong: str
    killer: str

    @property
    def name(self) -> str:
        return self.apply.__name__


MUTANTS: list[Mutant] = []


def mutant(killer: str, wrong: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(apply, wrong, killer))
        return apply

    return register


# -- allocators


@mutant("allocators", "page 0 is handed out, and padded tokens overwrite a request")
def padding_page_is_handed_out(patch: Patch) -> None:
    real = BaseTokenToKVPoolAllocator.clear

    def clear(allocator: BaseTokenToKVPoolAllocator) -> None:
        real(allocator)
        allocator.ids._ring -= 1

    patch.setattr(BaseTokenToKVPoolAllocator, "clear", clear)


@mutant("allocators", "a decoding sequence gets its new page one token too late and writes into its neighbour")
def decode_crosses_one_token_late(patch: Patch) -> None:
    real = TokenSlots.alloc_extend

    def alloc_extend(allocator: TokenSlots, prefix: Any, seq: Any, last_loc: Any, num_tokens: Any = None) -> Any:
        before, after, last = np.asarray(prefix), np.asarray(seq), np.asarray(last_loc, dtype=np.int64)
        if not len(after) or (after - before != 1).any():
            return real(allocator, prefix, seq, last_loc, num_tokens)
        crosses = after % allocator.page_size == 0
        pages = allocator.alloc_pages(int(np.count_nonzero(crosses)))
        slots = (last + 1).astype(np.int32)
        slots[crosses] = pages * np.int32(allocator.page_size)
        return slots

    patch.setattr(TokenSlots, "alloc_extend", alloc_extend)


@mutant("allocators", "a page freed twice is handed out twice")
def double_free_is_accepted(patch: Patch) -> None:
    patch.setattr(IdPool, "check_out", lambda pool, ids: ids)


@mutant("allocators", "slots of one page given back together count as several pages")
def free_does_not_merge_slots_of_a_page(patch: Patch) -> None:
    patch.setattr(
        PagedTokenToKVPoolAllocator,
        "pages_of",
        lambda allocator, slots: (slots // allocator.page_size).astype(np.int32),
    )


@mutant("allocators", "what is freed inside a group is available before the group ends")
def group_frees_at_once(patch: Patch) -> None:
    real = BaseTokenToKVPoolAllocator.free_pages

    def free_pages(allocator: BaseTokenToKVPoolAllocator, pages: Any) -> None:
        group, allocator._group = allocator._group, None
        real(allocator, pages)
        allocator._group = group

    patch.setattr(BaseTokenToKVPoolAllocator, "free_pages", free_pages)


# -- windows: two sides with one id


@mutant("windows", "each time the full side is short, window pages are lost for good")
def window_side_leaks_when_full_is_short(patch: Patch) -> None:
    def check_room(both: SWATokenToKVPoolAllocator, num_pages: int) -> None:
        taken = both.swa_attn_allocator.alloc_pages(num_pages)
        both.full_attn_allocator.ids.check_room(num_pages)
        both.swa_attn_allocator.free_pages(taken)

    patch.setattr(SWATokenToKVPoolAllocator, "_check_room", check_room)


@mutant("windows", "each time the window side is short, a decode loses pages of the full side for good")
def full_side_leaks_when_window_is_short(patch: Patch) -> None:
    patch.setattr(SWATokenToKVPoolAllocator, "_check_room", lambda both, num_pages: None)


@mutant("windows", "a page that was freed still maps to a window page that is now another request's")
def free_does_not_clear_the_mapping(patch: Patch) -> None:
    def drop(group: PageFrames, pages: Any) -> Any:
        had = pages[group.table.present(pages)]
        group.allocator.free_pages(np.sort(group.table.frame[had]))
        return had

    patch.setattr(PageFrames, "drop", drop)


@mutant("windows", "a request that leaves a window behind loses the page itself, which others still read in full")
def free_swa_frees_the_full_side_too(patch: Patch) -> None:
    patch.setattr(SWATokenToKVPoolAllocator, "vacate", lambda both, pages: both.free(pages * both.page_size))


@mutant("windows", "the map is cleared before anyone has read which window pages to free: they are lost for good")
def the_map_is_cleared_first(patch: Patch) -> None:
    real = SWATokenToKVPoolAllocator.drop

    def drop(both: SWATokenToKVPoolAllocator, pages: Any) -> None:
        both.table.unbind(pages)
        real(both, pages)

    patch.setattr(SWATokenToKVPoolAllocator, "drop", drop)


@mutant("windows", "a window freed twice is silently accepted, and some day it is another request's")
def a_window_is_freed_twice(patch: Patch) -> None:
    def vacate(both: SWATokenToKVPoolAllocator, pages: Any) -> None:
        both.full_attn_allocator.ids.check_out(pages)
        both.drop(pages.astype(np.int32))

    patch.setattr(SWATokenToKVPoolAllocator, "vacate", vacate)


@mutant(
    "windows", "a sequence goes on inside a page whose window is gone, and all such sequences share the padding page"
)
def tokens_without_a_window(patch: Patch) -> None:
    patch.setattr(SWATokenToKVPoolAllocator, "_check_continued", lambda both, *lengths: None)


@mutant("windows", "no slot maps to the padding page, where it is read as if it were a token")
def no_slot_is_a_slot(patch: Patch) -> None:
    real = residency.Column.__init__

    def init(column: Any, *args: Any, **options: Any) -> None:
        real(column, *args, **options)
        column.mapping[-1] = 0

    patch.setattr(residency.Column, "__init__", init)


@mutant("windows", "admission sees the room of the full side only, and requests meet a full window side later")
def only_the_full_side_counts(patch: Patch) -> None:
    def available(both: SWATokenToKVPoolAllocator) -> int:
        return both.full_available_size()

    patch.setattr(SWATokenToKVPoolAllocator, "available_size", available)


@mutant("windows", "a frame handed to another page is still the first one's too, and is freed twice")
def a_frame_moves_and_stays(patch: Patch) -> None:
    real = Column.move

    def move(table: Column, old_pages: Any, new_pages: Any) -> None:
        frames = table.frame[old_pages]
        real(table, old_pages, new_pages)
        table.frame[old_pages] = frames

    patch.setattr(Column, "move", move)


# -- states


@mutant("states", "slots set aside for a batch and not used are lost for good")
def group_end_forgets_unused_slots(patch: Patch) -> None:
    patch.setattr(MambaSlotAllocator, "alloc_group_end", lambda slots: setattr(slots, "_group", None))


@mutant("states", "slot 0 is handed out, and padded sequences overwrite a state")
def slot_zero_is_handed_out(patch: Patch) -> None:
    real = MambaSlotAllocator.clear

    def clear(slots: MambaSlotAllocator) -> None:
        real(slots)
        slots.ids._ring -= 1

    patch.setattr(MambaSlotAllocator, "clear", clear)


@mutant("states", "a state freed twice is handed out twice, and two sequences overwrite each other")
def double_free_of_a_state_is_accepted(patch: Patch) -> None:
    double_free_is_accepted(patch)


@mutant("states", "a batch takes more than was set aside for it, from slots that admission has promised to others")
def a_group_takes_from_the_free_list(patch: Patch) -> None:
    real = MambaSlotAllocator.alloc

    def alloc(slots: MambaSlotAllocator, need_size: int) -> Any:
        group = slots._group
        if group is None or need_size <= len(group):
            return real(slots, need_size)
        slots._group = None
        try:
            return real(slots, need_size)
        finally:
            slots._group = group

    patch.setattr(MambaSlotAllocator, "alloc", alloc)


@mutant("states", "slots that are only set aside count as free, and a second batch counts on them")
def set_aside_counts_as_free(patch: Patch) -> None:
    patch.setattr(MambaSlotAllocator, "available_size", lambda slots: slots.ids.num_free + slots.num_set_aside)


# -- events and policies


@mutant("policies", "hits are never counted, so LFU and SLRU are LRU under another name")
def hits_are_never_counted(patch: Patch) -> None:
    real = RadixCache.lease

    def lease(tree: RadixCache, match: Any, num_pages: int | None = None, *, priority: int = 0) -> Any:
        found = real(tree, match, num_pages, priority=priority)
        found.node.hits = 0
        return found

    patch.setattr(RadixCache, "lease", lease)


@mutant("policies", "a request's priority never reaches the pages it caches")
def priority_is_not_recorded(patch: Patch) -> None:
    real = RadixCache.lease
    patch.setattr(RadixCache, "lease", lambda tree, match, num_pages=None, *, priority=0: real(tree, match, num_pages))


# -- stored rows


@mutant("stored", "vectors are read with the scales of those that were in their slots before")
def scales_are_not_written(patch: Patch) -> None:
    real = PagedField.write

    def write(rows: PagedField, slots: Any, new: Any) -> Any:
        scales = rows.stored[1]
        before = None if scales is None else scales.clone()
        found = real(rows, slots, new)
        if scales is not None and before is not None:
            scales.copy_(before)
        return found

    patch.setattr(PagedField, "write", write)


@mutant("stored", "scattered vectors are read with the scales of the first ones of the pool")
def scales_are_not_gathered(patch: Patch) -> None:
    real = PagedField._gathered

    def gathered(field: PagedField, rows: Any, places: SlotIndex, name: str) -> Any:
        first = SlotIndex(torch.arange(len(places.slots)))
        return real(field, rows, first if name.endswith("scales") else places, name)

    patch.setattr(PagedField, "_gathered", gathered)


@mutant("stored", "a vector at the end of a run is read with the scale of one at its beginning")
def scales_are_read_from_slot_zero(patch: Patch) -> None:
    real = PagedField._gathered

    def gathered(field: PagedField, rows: Any, places: SlotIndex, name: str) -> Any:
        first = SlotIndex(places.slots - places.slots.min()) if name.endswith("scales") else places
        return real(field, rows, first, name)

    patch.setattr(PagedField, "_gathered", gathered)


@mutant("stored", "a token is exact in the step that computes it and rounded after it: answers depend on the chunks")
def new_rows_are_not_rounded(patch: Patch) -> None:
    real = PagedField.write

    def write(rows: PagedField, slots: Any, new: Any) -> Any:
        real(rows, slots, new)
        return new

    patch.setattr(PagedField, "write", write)


@mutant("stored", "values are decoded over the keys that attention is about to read")
def fields_share_scratch_memory(patch: Patch) -> None:
    real = PagedField.gather
    patch.setattr(PagedField, "gather", lambda rows, index, dtype, name: real(rows, index, dtype, "one"))


@mutant("stored", "a token is written to a copy of a field, and lost")
def fields_are_written_in_a_copy(patch: Patch) -> None:
    real = _Rows.__init__

    def init(rows: _Rows, frames: torch.Tensor) -> None:
        real(rows, frames)
        rows._flat, rows._ratio = _bytes_of(frames).flatten(0, 1), frames.shape[1]

    patch.setattr(_Rows, "__init__", init)


@mutant("stored", "a token is written over other fields: the frames of a field are taken for neighbours")
def the_stride_of_frames_is_that_of_their_entries(patch: Patch) -> None:
    patch.setattr(SlotIndex, "rows", lambda places, entries, ratio: places.slots)


@mutant("stored", "scales are written where those of frames with the distances of another field would be")
def places_of_one_field_are_those_of_all(patch: Patch) -> None:
    real = SlotIndex.rows

    def rows(places: SlotIndex, entries: int, ratio: int) -> Any:
        known = next(iter(places._found.values()), None)
        return real(places, entries, ratio) if known is None or ratio == entries else known

    patch.setattr(SlotIndex, "rows", rows)


# -- planning


@mutant("planner", "every pool is one frame larger than its budget, and the last allocation at start fails")
def padding_is_free(patch: Patch) -> None:
    patch.setattr(configurator, "PADDING", 0)


@mutant("planner", "an FP8 row of sparse latent attention is priced like a plain one: 11 % over-committed")
def a_latent_row_is_priced_plainly(patch: Patch) -> None:
    real = LatentCall.parts

    def parts(call: LatentCall, kv_format: KVFormat, model_dtype: Any) -> Any:
        plain = LatentCall(rank=call.rank, rope_dim=call.rope_dim)
        index = real(call, kv_format, model_dtype)[-2:] if call.index_dim else ()
        return real(plain, kv_format, model_dtype) + index

    patch.setattr(LatentCall, "parts", parts)


@mutant("planner", "layers that share an indexer's selection are charged for keys they do not keep")
def every_layer_owns_an_indexer(patch: Patch) -> None:
    real = LatentCall.parts

    def parts(call: LatentCall, kv_format: KVFormat, model_dtype: Any) -> Any:
        owner = LatentCall(rank=call.rank, rope_dim=call.rope_dim, sparse=call.sparse, index_dim=128)
        return real(owner, kv_format, model_dtype)

    patch.setattr(LatentCall, "parts", parts)


@mutant("planner", "the scales of quantised keys and values are in no budget")
def scales_are_free(patch: Patch) -> None:
    real = layers.formatted
    patch.setattr(layers, "formatted", lambda *args, **options: real(*args, **options)[:1])


@mutant("planner", "keys and values of different width are priced as if both had the keys'")
def values_are_as_wide_as_keys(patch: Patch) -> None:
    real = AttentionCall.parts

    def parts(call: AttentionCall, kv_format: KVFormat, model_dtype: Any) -> Any:
        wide = AttentionCall(kv_heads=call.kv_heads, key_dim=call.key_dim, value_dim=call.key_dim, window=call.window)
        return real(wide, kv_format, model_dtype)

    patch.setattr(AttentionCall, "parts", parts)


@mutant("planner", "a cap on tokens shrinks the full pool and leaves the window pool its bytes")
def a_cap_shrinks_one_side(patch: Patch) -> None:
    real = MemoryPoolConfigurator.calculate_pool_sizes_from_max_tokens

    def capped(solve: MemoryPoolConfigurator, tokens: int, page_size: int) -> Any:
        rules = HybridSWAPoolConfigurator._window_rule
        patch.setattr(
            HybridSWAPoolConfigurator,
            "_window_rule",
            lambda self, group, size: PoolRule(group=group, per_token=Fraction(0), minimum=5000, why=""),
        )
        try:
            return real(solve, tokens, page_size)
        finally:
            patch.setattr(HybridSWAPoolConfigurator, "_window_rule", rules)

    patch.setattr(MemoryPoolConfigurator, "calculate_pool_sizes_from_max_tokens", capped)


@mutant("planner", "a window pool below its window and a page starts, and the first long request waits for ever")
def small_windows_are_accepted(patch: Patch) -> None:
    patch.setattr(HybridSWAPoolConfigurator, "_check", lambda solve, config: None)


@mutant("planner", "draft layers have keys and values outside of the budget")
def drafts_are_free(patch: Patch) -> None:
    real = ModelSpec.groups
    patch.setattr(ModelSpec, "groups", lambda spec, *args, **options: real(spec, *args, **{**options, "num_drafts": 0}))


@mutant("planner", "states are charged whole on every rank, and half of them are never used")
def states_are_not_split(patch: Patch) -> None:
    patch.setattr(StateCall, "on_rank", lambda call, tp: call)


@mutant("planner", "ranks that share pages count the tokens of one rank only")
def shared_pages_count_once(patch: Patch) -> None:
    real = MemoryPoolConfigurator._full_rule

    def rule(solve: MemoryPoolConfigurator, group: Any, page_size: int) -> PoolRule:
        found = real(solve, group, page_size)
        return PoolRule(group=group, per_token=Fraction(1, page_size), why=found.why)

    patch.setattr(MemoryPoolConfigurator, "_full_rule", rule)


# -- lanes and deadlines


@mutant("lanes", "a store that hangs keeps cached pages from the device, for all requests")
def a_store_shares_the_threads_of_the_device(patch: Patch) -> None:
    real = ThreadMover.__init__

    def init(mover: ThreadMover, *args: Any, **options: Any) -> None:
        real(mover, *args, **options)
        mover._channels[Endpoint.DEVICE] = mover._channels[Endpoint.STORE]

    patch.setattr(ThreadMover, "__init__", init)


@mutant("lanes", "a frame is given to another page while a store that is late still writes to it")
def what_has_expired_is_handed_back_at_once(patch: Patch) -> None:
    real = ThreadMover._expire

    def expire(mover: ThreadMover) -> None:
        real(mover)
        for channel in mover._channels.values():
            for transfer in channel.running:
                if transfer.expired:
                    mover._end(transfer)

    patch.setattr(ThreadMover, "_expire", expire)


@mutant("lanes", "in the simulator, frames of a late transfer are free at its deadline, so that no test would see it")
def virtual_transfers_end_at_their_deadline(patch: Patch) -> None:
    real = VirtualMover._expire

    def expire(mover: VirtualMover, transfer: Transfer) -> None:
        real(mover, transfer)
        if transfer.expired and not transfer.done:
            transfer.end()
            mover._ended.append(transfer)

    patch.setattr(VirtualMover, "_expire", expire)


@mutant("lanes", "requests and frames wait for a store that hangs, for ever")
def deadlines_never_pass(patch: Patch) -> None:
    patch.setattr(Mover, "_overdue", lambda mover, now: [])


@mutant("lanes", "what waits behind a store that hangs keeps its frames for ever")
def what_waits_does_not_expire(patch: Patch) -> None:
    real = ThreadMover._expire

    def expire(mover: ThreadMover) -> None:
        waiting = [channel.waiting for channel in mover._channels.values()]
        for channel in mover._channels.values():
            channel.waiting = []
        real(mover)
        for channel, was in zip(mover._channels.values(), waiting, strict=True):
            channel.waiting = was

    patch.setattr(ThreadMover, "_expire", expire)


# -- what is worth moving


@mutant("links", "a link that loses is on again because another one is fast, time after time")
def a_trial_is_won_by_a_save(patch: Patch) -> None:
    real = BreakEven._begin_trial

    def begin_trial(even: Any, state: Any, num_bytes: int) -> None:
        real(even, state, num_bytes)
        if state.lane is Lane.LOAD and even._lanes[Lane.SAVE].rate.known:
            state.rate, state.trial, state.rest = copy(even._lanes[Lane.SAVE].rate), _Trial.MEASURED, 1.0

    patch.setattr(BreakEven, "_begin_trial", begin_trial)


@mutant("looks", "a request that only waits uses up the trials of a link, which stays off for ever")
def a_look_counts_as_a_trial(patch: Patch) -> None:
    def pays(offload: Tiered, tokens: int, num_bytes: int) -> bool:
        tiers = offload.tiers
        return tiers.break_even.decide(Lane.LOAD, tokens, num_bytes, tiers.mover.in_flight(Lane.LOAD))

    patch.setattr(Tiered, "_pays", pays)


@mutant("empty stores", "every request waits for a store that brings nothing")
def what_brings_nothing_is_not_counted(patch: Patch) -> None:
    patch.setattr(BreakEven, "failed", lambda even, link, seconds: None)
