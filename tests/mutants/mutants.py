"""Mistakes that engines of this kind have shipped, each as a change to the real code. Every one must be noticed.

A mutant is a function that breaks something, a sentence that says what goes wrong for a user, and the check that has to
fail: the stateful check of the cache, of the allocators, of windows, of states, of stored rows, of the scheduler, the
table of eviction orders, or the second planner. Add one when a bug was found that no check had seen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from quire.cache import kv_cache
from quire.cache.fences import Fences
from quire.cache.groups import WholeGroup
from quire.cache.kv_cache import KVCache
from quire.errors import OutOfPages
from quire.kernels import stored
from quire.kernels.stored import StoredRows
from quire.memory import frames as frame_table
from quire.memory.allocator import (
    BaseTokenToKVPoolAllocator,
    MambaSlotAllocator,
    PagedTokenToKVPoolAllocator,
    PageFrames,
    SWATokenToKVPoolAllocator,
)
from quire.memory.allocator import mamba as mamba_slots
from quire.memory.allocator.free_list import FreeList
from quire.memory.frames import FrameTable
from quire.plan import configurator
from quire.plan.budget import MemoryPlan
from quire.plan.configurator import HybridSWAPoolConfigurator, MemoryPoolConfigurator, PoolRule
from quire.prefix import radix_cache
from quire.prefix.radix_cache import Insertion, RadixCache
from quire.scheduler.scheduler import Scheduler
from quire.spec import layers
from quire.spec.events import Namespace
from quire.spec.kv_format import KVFormat
from quire.spec.layers import AttentionCall, LatentCall, StateCall
from quire.spec.model import ModelSpec

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


# -- leases


@mutant("cache", "a prefix in use loses its pin when another request cuts its edge, and is evicted under it")
def split_loses_leases(patch: Patch) -> None:
    real = RadixCache._split

    def split(tree: RadixCache, node: Any, at: int) -> Any:
        upper = real(tree, node, at)
        upper.leases = 0
        return upper

    patch.setattr(RadixCache, "_split", split)


@mutant("cache", "pins on shared ancestors are never given back, and the pool fills with what nobody uses")
def release_unpins_only_the_node(patch: Patch) -> None:
    real = RadixCache.release

    def release(tree: RadixCache, lease: Any) -> None:
        above = list(tree._upward(lease.node))[1:]
        real(tree, lease)
        for node in above:
            node.leases += 1

    patch.setattr(RadixCache, "release", release)


@mutant("cache", "a running request reads pages that were evicted and given to another")
def evict_ignores_leases(patch: Patch) -> None:
    real = RadixCache.evict

    def evict(tree: RadixCache, num_pages: int) -> Any:
        held = [(node, node.leases) for node in tree.nodes()]
        for node, _ in held:
            node.leases = 0
            tree._offer(node)
        victims = real(tree, num_pages)
        for node, leases in held:
            node.leases = leases
        return victims

    patch.setattr(RadixCache, "evict", evict)


@mutant("cache", "a request that ends releases what it shared twice over, once by itself and once with its pages")
def finish_frees_protected_pages(patch: Patch) -> None:
    real = KVCache._retire

    def retire(cache: KVCache, retired: Any) -> None:
        if retired.lease is not None:
            shared = cache.tree.path_pages(retired.lease)
            retired = replace(retired, pages=np.concatenate((shared[-1:], retired.pages)))
        real(cache, retired)

    patch.setattr(KVCache, "_retire", retire)


# -- steps in flight


@mutant("cache", "pages are handed out while a launched step still reads them")
def free_before_fence(patch: Patch) -> None:
    patch.setattr(Fences, "retire", lambda fences, retired: True)


@mutant("cache", "the first step to settle frees what a later one in flight still reads")
def fence_waits_for_the_oldest_step_only(patch: Patch) -> None:
    real = Fences.close

    def close(fences: Fences, fence: int) -> Any:
        fences._waiting = type(fences._waiting)((fence, retired) for _, retired in fences._waiting)
        return real(fences, fence)

    patch.setattr(Fences, "close", close)


@mutant("cache", "tokens that are only allocated become reusable, before any step has written them")
def commit_takes_allocated_for_settled(patch: Patch) -> None:
    real = KVCache.commit

    def commit(cache: KVCache, kv: Any, tokens: Any) -> None:
        missing = cache.allocated(kv) - len(tokens)
        real(cache, kv, np.append(tokens, np.zeros(missing, dtype=np.int32)))

    patch.setattr(KVCache, "commit", commit)


@mutant("scheduler", "the scheduler commits what it has launched, and others reuse what is not computed yet")
def scheduler_commits_what_is_launched(patch: Patch) -> None:
    real = Scheduler.settle

    def settle(scheduler: Scheduler, batch: Any, drawn: Any) -> Any:
        for work in batch.works:
            work.count = min(work.request.num_launched, work.request.num_tokens) - work.start
        return real(scheduler, batch, drawn)

    patch.setattr(Scheduler, "settle", settle)


# -- duplicates and tails


@mutant("cache", "two requests compute the same prefix, and one copy is lost for good")
def duplicates_leak(patch: Patch) -> None:
    real = RadixCache.insert

    def insert(tree: RadixCache, *args: Any) -> Insertion:
        found = real(tree, *args)
        return Insertion(found.pages, found.duplicates[:0])

    patch.setattr(RadixCache, "insert", insert)


@mutant("cache", "the duplicate is freed and the request goes on reading it")
def duplicates_freed_but_still_in_the_row(patch: Patch) -> None:
    real = RadixCache.insert

    def insert(tree: RadixCache, lease: Any, tokens: Any, pages: Any) -> Insertion:
        found = real(tree, lease, tokens, pages)
        return Insertion(pages.copy(), found.duplicates)

    patch.setattr(RadixCache, "insert", insert)


@mutant("cache", "the pages freed as duplicates are a view of a row that was rewritten: the tree's are freed instead")
def duplicates_are_a_view(patch: Patch) -> None:
    class View(np.ndarray):  # type: ignore[type-arg]
        def copy(self, order: Any = "C") -> Any:
            return self

    real = RadixCache.insert

    def insert(tree: RadixCache, lease: Any, tokens: Any, pages: Any) -> Insertion:
        found = real(tree, lease, tokens, pages)
        return Insertion(found.pages, found.duplicates.view(View))

    patch.setattr(RadixCache, "insert", insert)


@mutant("cache", "the tree keeps a view of a request's row, which the next request overwrites")
def tree_keeps_a_view_of_the_row(patch: Patch) -> None:
    real = RadixCache._append

    def append(tree: RadixCache, node: Any, lease: Any, data: bytes, pages: Any) -> Any:
        leaf = real(tree, node, lease, data, pages)
        if len(leaf.pages) == len(pages):
            leaf.pages = pages
        return leaf

    patch.setattr(RadixCache, "_append", append)


@mutant("cache", "the last page of every request, full or in part, is lost")
def tail_page_leaks(patch: Patch) -> None:
    real = KVCache._retire

    def retire(cache: KVCache, retired: Any) -> None:
        pages = retired.pages if retired.lease is None else retired.pages[:-1]
        real(cache, replace(retired, pages=pages))

    patch.setattr(KVCache, "_retire", retire)


# -- matching


@mutant("cache", "one tenant's pages answer another's prompt")
def match_ignores_the_namespace(patch: Patch) -> None:
    real = RadixCache.match

    def match(tree: RadixCache, namespace: Namespace, tokens: Any) -> Any:
        found = [real(tree, other, tokens) for other in (namespace, *tree.roots())]
        return max(found, key=lambda match: match.num_pages)

    patch.setattr(RadixCache, "match", match)


@mutant("cache", "an adapter called like another tenant's salt shares its pages")
def adapter_and_salt_are_one_field(patch: Patch) -> None:
    def joined(namespace: Namespace) -> Namespace:
        return Namespace(namespace.adapter + namespace.salt)

    real_match, real_root = RadixCache.match, RadixCache._root
    patch.setattr(RadixCache, "match", lambda tree, ns, tokens: real_match(tree, joined(ns), tokens))
    patch.setattr(RadixCache, "_root", lambda tree, ns: real_root(tree, joined(ns)))


@mutant("cache", "a page that differs in its last tokens is taken for a match")
def match_is_not_page_aligned(patch: Patch) -> None:
    real = radix_cache._common_prefix

    def common(data: bytes, at: int, key: bytes, length: int, unit: int) -> int:
        tokens = real(data, at, key, length, radix_cache.TOKEN_BYTES)
        return min(length, -(-tokens // unit) * unit)

    patch.setattr(radix_cache, "_common_prefix", common)


@mutant("cache", "a prompt that is cached to its last token has nothing left to compute its output from")
def match_returns_the_last_token_too(patch: Patch) -> None:
    real = KVCache.match

    def match(cache: KVCache, tokens: Any, namespace: Namespace = kv_cache.NAMESPACE) -> Any:
        return real(cache, np.append(tokens, np.int32(0)), namespace)

    patch.setattr(KVCache, "match", match)


@mutant("cache", "a hit taken before an eviction is used after it")
def outdated_hit_is_used(patch: Patch) -> None:
    patch.setattr(RadixCache, "version", property(lambda tree: 0, lambda tree, value: None), raising=False)


@mutant("cache", "page ids are used where the pool is indexed by frames")
def page_ids_index_the_pool(patch: Patch) -> None:
    def page_table(cache: KVCache, kvs: Any, num_tokens: Any, group: int = 0) -> Any:
        width = -(-int(num_tokens.max(initial=1)) // cache.page_size)
        return cache._rows[cache._rows_of(kvs), :width]

    patch.setattr(KVCache, "page_table", page_table)


# -- running out


@mutant("cache", "half of a batch gets its pages before the other half fails, and keeps them")
def extend_stops_half_way(patch: Patch) -> None:
    real = KVCache.extend

    def extend(cache: KVCache, kvs: Any, counts: Any) -> None:
        for kv, count in zip(kvs, counts, strict=True):
            real(cache, [kv], [count])

    patch.setattr(KVCache, "extend", extend)


@mutant("cache", "a refused allocation still took its page ids; only the frames were missing")
def pages_leak_when_frames_run_out(patch: Patch) -> None:
    real = KVCache._make_room

    def make_room(cache: KVCache, rows: Any, wanted: int) -> None:
        try:
            real(cache, rows, wanted)
        except OutOfPages:
            cache.pages.alloc_pages(min(1, cache.pages.num_free_pages))
            raise

    patch.setattr(KVCache, "_make_room", make_room)


@mutant("cache", "everything cached is thrown away for a request that is refused anyway")
def evict_before_refusing(patch: Patch) -> None:
    real = KVCache._make_room

    def make_room(cache: KVCache, rows: Any, wanted: int) -> None:
        cache.evict(max(0, wanted - cache.num_free_pages))
        real(cache, rows, wanted)

    patch.setattr(KVCache, "_make_room", make_room)


@mutant("cache", "a request that would fit after eviction is refused")
def evictable_pages_do_not_count(patch: Patch) -> None:
    patch.setattr(WholeGroup, "num_evictable", property(lambda group: 0))


@mutant("cache", "more is evicted than was needed")
def evict_takes_one_too_many(patch: Patch) -> None:
    real = RadixCache.evict
    patch.setattr(RadixCache, "evict", lambda tree, num_pages: real(tree, num_pages + (num_pages > 0)))


# -- allocators


@mutant("allocators", "page 0 is handed out, and padded tokens overwrite a request")
def padding_page_is_handed_out(patch: Patch) -> None:
    real = BaseTokenToKVPoolAllocator.clear

    def clear(allocator: BaseTokenToKVPoolAllocator) -> None:
        real(allocator)
        allocator._free = FreeList(np.arange(allocator.num_pages, dtype=np.int32), allocator.num_pages)

    patch.setattr(BaseTokenToKVPoolAllocator, "clear", clear)


@mutant("allocators", "a decoding sequence gets its new page one token too late and writes into its neighbour")
def decode_crosses_one_token_late(patch: Patch) -> None:
    def alloc_decode(allocator: BaseTokenToKVPoolAllocator, seq_lens: Any, last_loc: Any) -> Any:
        seq, last = np.asarray(seq_lens), np.asarray(last_loc, dtype=np.int64)
        crosses = seq % allocator.page_size == 0
        pages = allocator.alloc_pages(int(np.count_nonzero(crosses)))
        slots = (last + 1).astype(np.int32)
        slots[crosses] = pages * np.int32(allocator.page_size)
        return slots

    patch.setattr(BaseTokenToKVPoolAllocator, "alloc_decode", alloc_decode)


@mutant("allocators", "a snapshot shares its arrays with the allocator, so restoring it twice restores another state")
def restored_state_is_a_view(patch: Patch) -> None:
    real = BaseTokenToKVPoolAllocator.restore_state

    def restore_state(allocator: BaseTokenToKVPoolAllocator, state: Any) -> None:
        real(allocator, state)
        allocator._out = state.out

    patch.setattr(BaseTokenToKVPoolAllocator, "restore_state", restore_state)


@mutant("allocators", "a page freed twice is handed out twice")
def double_free_is_accepted(patch: Patch) -> None:
    patch.setattr(BaseTokenToKVPoolAllocator, "check_out", lambda allocator, pages: None)


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
        both.full_attn_allocator.check_room(num_pages)
        both.swa_attn_allocator.free_pages(taken)

    patch.setattr(SWATokenToKVPoolAllocator, "_check_room", check_room)


@mutant("windows", "each time the window side is short, a decode loses pages of the full side for good")
def full_side_leaks_when_window_is_short(patch: Patch) -> None:
    patch.setattr(SWATokenToKVPoolAllocator, "_check_room", lambda both, num_pages: None)


@mutant("windows", "a page that was freed still maps to a window page that is now another request's")
def free_does_not_clear_the_mapping(patch: Patch) -> None:
    def drop(group: PageFrames, pages: Any) -> Any:
        had = pages[group.resident(pages)]
        group.allocator.free_pages(np.sort(group.column[had]))
        return had

    patch.setattr(PageFrames, "drop", drop)


@mutant("windows", "a request that leaves a window behind loses the page itself, which others still read in full")
def free_swa_frees_the_full_side_too(patch: Patch) -> None:
    patch.setattr(SWATokenToKVPoolAllocator, "free_swa", SWATokenToKVPoolAllocator.free)


@mutant("windows", "the map is cleared before anyone has read which window pages to free: they are lost for good")
def full_side_is_freed_first(patch: Patch) -> None:
    real = SWATokenToKVPoolAllocator.drop

    def free(both: SWATokenToKVPoolAllocator, free_index: Any) -> None:
        pages = both._pages_out(free_index)
        both.full_attn_allocator.free_pages(pages)
        both.frames.unbind(both.tier, both.group, pages)
        real(both, pages)

    patch.setattr(SWATokenToKVPoolAllocator, "free", free)


@mutant("windows", "a prompt that arrives with its tail only takes window pages for all of it")
def a_tail_maps_every_page(patch: Patch) -> None:
    real = SWATokenToKVPoolAllocator.alloc_extend_swa_tail

    def tail(both: Any, prefix: Any, seq: Any, last: Any, total: Any, swa_tail_len: int) -> Any:
        return real(both, prefix, seq, last, total, seq[0] - prefix[0] if swa_tail_len else 0)

    patch.setattr(SWATokenToKVPoolAllocator, "alloc_extend_swa_tail", tail)


@mutant("windows", "the page in which a tail begins has no window, so its first tokens are written to the padding page")
def a_tail_is_rounded_down(patch: Patch) -> None:
    real = SWATokenToKVPoolAllocator.alloc_extend_swa_tail

    def tail(both: Any, prefix: Any, seq: Any, last: Any, total: Any, swa_tail_len: int) -> Any:
        begins = -(-(seq[0] - swa_tail_len) // both.page_size) * both.page_size
        return real(both, prefix, seq, last, total, max(0, seq[0] - begins))

    patch.setattr(SWATokenToKVPoolAllocator, "alloc_extend_swa_tail", tail)


@mutant("windows", "a window freed twice is silently accepted, and some day it is another request's")
def a_window_is_freed_twice(patch: Patch) -> None:
    def free_swa(both: SWATokenToKVPoolAllocator, free_index: Any) -> None:
        both.drop(both._pages_out(free_index))

    patch.setattr(SWATokenToKVPoolAllocator, "free_swa", free_swa)


@mutant(
    "windows", "a sequence goes on inside a page whose window is gone, and all such sequences share the padding page"
)
def tokens_without_a_window(patch: Patch) -> None:
    patch.setattr(SWATokenToKVPoolAllocator, "_check_windows", lambda both, last_loc: None)


@mutant("windows", "no slot translates to the padding page, where it is read as if it were a token")
def no_slot_is_a_slot(patch: Patch) -> None:
    patch.setattr(frame_table, "_nothing", lambda num_pages: np.zeros(num_pages + 2, dtype=np.int32))


@mutant("windows", "windows freed since a snapshot stay gone after it is restored, though their pages are out")
def a_snapshot_forgets_the_map(patch: Patch) -> None:
    def restore_state(both: SWATokenToKVPoolAllocator, state: Any) -> None:
        both.full_attn_allocator.restore_state(state.full)
        both.swa_attn_allocator.restore_state(state.swa)

    patch.setattr(SWATokenToKVPoolAllocator, "restore_state", restore_state)


@mutant("windows", "admission sees the room of the full side only, and requests meet a full window side later")
def only_the_full_side_counts(patch: Patch) -> None:
    def available(both: SWATokenToKVPoolAllocator) -> int:
        return both.full_available_size()

    patch.setattr(SWATokenToKVPoolAllocator, "available_size", available)


@mutant("windows", "a frame handed to another page is still the first one's too, and is freed twice")
def a_frame_moves_and_stays(patch: Patch) -> None:
    real = FrameTable.move

    def move(table: FrameTable, tier: Any, group: int, old_pages: Any, new_pages: Any) -> None:
        frames = table.column(tier, group)[old_pages]
        real(table, tier, group, old_pages, new_pages)
        table.column(tier, group)[old_pages] = frames

    patch.setattr(FrameTable, "move", move)


# -- states


@mutant("states", "slots set aside for a batch and not used are lost for good")
def group_end_forgets_unused_slots(patch: Patch) -> None:
    patch.setattr(MambaSlotAllocator, "alloc_group_end", lambda slots: setattr(slots, "_group", None))


@mutant("states", "when matching a batch fails, the slots that were set aside for it are never free again")
def a_failed_block_leaves_its_group_open(patch: Patch) -> None:
    @contextmanager
    def alloc_group(slots: MambaSlotAllocator, num_requests: int) -> Any:
        slots.alloc_group_begin(num_requests)
        yield
        slots.alloc_group_end()

    patch.setattr(MambaSlotAllocator, "alloc_group", alloc_group)


@mutant("states", "slot 0 is handed out, and padded sequences overwrite a state")
def slot_zero_is_handed_out(patch: Patch) -> None:
    real = MambaSlotAllocator.clear

    def clear(slots: MambaSlotAllocator) -> None:
        real(slots)
        slots._free = FreeList(np.arange(slots.size, dtype=np.int32), slots.size)

    patch.setattr(MambaSlotAllocator, "clear", clear)


@mutant("states", "a state freed twice is handed out twice, and two sequences overwrite each other")
def double_free_of_a_state_is_accepted(patch: Patch) -> None:
    real = mamba_slots.check_given_back

    def check(ids: Any, out: Any, *, group: str, noun: str) -> None:
        real(ids, np.arange(len(out)) > 0, group=group, noun=noun)

    patch.setattr(mamba_slots, "check_given_back", check)


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
    patch.setattr(MambaSlotAllocator, "available_size", lambda slots: slots.num_free + slots.num_set_aside)


# -- events and policies


@mutant("cache", "routers are never told that a page is gone")
def removals_are_not_told(patch: Patch) -> None:
    patch.setattr(RadixCache, "_emit_removed", lambda tree, node, keep: None)


@mutant("cache", "routers are told that a whole edge is gone when only its tail was evicted")
def removals_name_the_whole_edge(patch: Patch) -> None:
    real = RadixCache._emit_removed
    patch.setattr(RadixCache, "_emit_removed", lambda tree, node, keep: real(tree, node, 0))


@mutant("cache", "after a split, hashes chain from the wrong parent")
def split_keeps_all_hashes_below(patch: Patch) -> None:
    real = RadixCache._split

    def split(tree: RadixCache, node: Any, at: int) -> Any:
        hashes = node.hashes
        upper = real(tree, node, at)
        upper.hashes = hashes
        return upper

    patch.setattr(RadixCache, "_split", split)


@mutant("cache", "two tenants' pages have one hash, and a router sends a prompt to pages that it may not read")
def hashes_ignore_the_namespace(patch: Patch) -> None:
    real = radix_cache.namespace_seed
    patch.setattr(radix_cache, "namespace_seed", lambda namespace, identity=b"": real(Namespace(), identity))


@mutant("policies", "hits are never counted, so LFU and SLRU are LRU under another name")
def hits_are_never_counted(patch: Patch) -> None:
    real = RadixCache.lease

    def lease(tree: RadixCache, match: Any, num_pages: int | None = None, *, priority: int = 0) -> Any:
        found = real(tree, match, num_pages, priority=priority)
        for node in tree._upward(found.node):
            node.hits = 0
        return found

    patch.setattr(RadixCache, "lease", lease)


@mutant("policies", "a request's priority never reaches the pages it caches")
def priority_is_not_recorded(patch: Patch) -> None:
    real = RadixCache.lease
    patch.setattr(RadixCache, "lease", lambda tree, match, num_pages=None, *, priority=0: real(tree, match, num_pages))


# -- scheduling


@mutant("scheduler", "the oldest request is preempted first, and two requests throw each other out for ever")
def preempt_the_first(patch: Patch) -> None:
    real = Scheduler._grant

    def grant(scheduler: Scheduler, batch: Any, works: Any) -> None:
        running = scheduler._running
        scheduler._running = running[::-1]
        real(scheduler, batch, works)
        scheduler._running = sorted(scheduler._running, key=lambda request: request.order)

    patch.setattr(Scheduler, "_grant", grant)


@mutant("scheduler", "two requests with one prefix wait for each other, and neither is ever admitted")
def leaders_may_be_waiting(patch: Patch) -> None:
    def leader(scheduler: Scheduler, request: Any, hit: Any) -> Any:
        same = (other for other in scheduler.waiting if other is not request and other.tokens[0] == request.tokens[0])
        return next(same, None)

    patch.setattr(Scheduler, "_leader", leader)


@mutant("scheduler", "a request is admitted that the pool can never hold, and waits for ever")
def the_limit_and_the_allocator_disagree(patch: Patch) -> None:
    patch.setattr(MemoryPlan, "pages_of", lambda plan, num_tokens: (num_tokens - 1) // plan.page_size)


@mutant("scheduler", "what a request had answered before it was preempted counts as its prompt and is not sent")
def preemption_makes_output_prompt(patch: Patch) -> None:
    real = Scheduler._preempt

    def preempt(scheduler: Scheduler, request: Any) -> None:
        real(scheduler, request)
        request.max_tokens -= request.num_outputs
        request.num_prompt_tokens = request.num_tokens

    patch.setattr(Scheduler, "_preempt", preempt)


# -- stored rows


@mutant("stored", "vectors are read with the scales of those that were in their slots before")
def scales_are_not_written(patch: Patch) -> None:
    real = StoredRows.write

    def write(rows: StoredRows, slots: Any, new: Any) -> Any:
        before = None if rows._scales is None else rows._scales.clone()
        found = real(rows, slots, new)
        if rows._scales is not None:
            rows._scales.copy_(before)
        return found

    patch.setattr(StoredRows, "write", write)


@mutant("stored", "scattered vectors are read with the scales of the first ones of the pool")
def scales_are_not_gathered(patch: Patch) -> None:
    real = stored._gathered

    def gathered(rows: Any, index: Any, name: str) -> Any:
        return rows[: len(index)] if name.endswith("scales") else real(rows, index, name)

    patch.setattr(stored, "_gathered", gathered)


@mutant("stored", "a vector at the end of a run is read with the scale of one at its beginning")
def scales_are_read_from_slot_zero(patch: Patch) -> None:
    real = StoredRows.read

    def read(rows: StoredRows, start: int, stop: int, dtype: Any) -> Any:
        scales = rows._scales
        rows._scales = None if scales is None else scales.roll(start, 0)
        found = real(rows, start, stop, dtype)
        rows._scales = scales
        return found

    patch.setattr(StoredRows, "read", read)


@mutant("stored", "a token is exact in the step that computes it and rounded after it: answers depend on the chunks")
def new_rows_are_not_rounded(patch: Patch) -> None:
    real = StoredRows.write

    def write(rows: StoredRows, slots: Any, new: Any) -> Any:
        real(rows, slots, new)
        return new

    patch.setattr(StoredRows, "write", write)


@mutant("stored", "values are decoded over the keys that attention is about to read")
def fields_share_scratch_memory(patch: Patch) -> None:
    real = StoredRows._decoded
    patch.setattr(
        StoredRows, "_decoded", lambda rows, numbers, scales, dtype, name: real(rows, numbers, scales, dtype, "one")
    )


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
            lambda self, group, size: PoolRule(group=group, per_token=configurator.Fraction(0), minimum=5000, why=""),
        )
        try:
            return real(solve, tokens, page_size)
        finally:
            patch.setattr(HybridSWAPoolConfigurator, "_window_rule", rules)

    patch.setattr(MemoryPoolConfigurator, "calculate_pool_sizes_from_max_tokens", capped)


@mutant("planner", "a window pool below its window and a page starts, and the first long request waits for ever")
def small_windows_are_accepted(patch: Patch) -> None:
    def check(solve: HybridSWAPoolConfigurator, config: Any) -> Any:
        tokens = [pool.frames * config.page_size for pool in config.pools if pool.name == "window"]
        return replace(config, swa_max_total_num_tokens=min(tokens, default=None))

    patch.setattr(HybridSWAPoolConfigurator, "_check", check)


@mutant("planner", "draft layers have keys and values that nobody budgeted")
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
        return PoolRule(group=group, per_token=configurator.Fraction(1, page_size), why=found.why)

    patch.setattr(MemoryPoolConfigurator, "_full_rule", rule)
