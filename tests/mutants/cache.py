"""Mistakes of the cache: what ends, what waits for steps in flight, what runs out."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.cache import kv_cache
from quire.cache.groups import NO_PAGES, PagedGroup
from quire.cache.growth import Growth
from quire.cache.hold import Fences
from quire.cache.kv_cache import KVCache
from quire.cache.request_kv import RequestKV
from quire.cache.running import RunningBatch, RunningTables
from quire.errors import OutOfPages
from quire.prefix.node import pages_to
from quire.spec.events import Namespace
from tests.mutants import field
from tests.mutants.registry import Patch, mutant


@mutant("cache", field.TWICE)
def finish_frees_protected_pages(patch: Patch) -> None:
    """A request that ends releases what it shared twice over, once by itself and once with its pages."""
    real = KVCache._retire

    def retire(cache: KVCache, pages: Any = NO_PAGES, lease: Any = None, released: Any = ()) -> None:
        if lease is not None:
            pages = np.concatenate((pages_to(lease.node)[-1:], pages))
        real(cache, pages, lease, released)

    patch.setattr(KVCache, "_retire", retire)


@mutant("cache", field.FREED_EARLY)
def free_before_fence(patch: Patch) -> None:
    """Pages are handed out while a launched step still reads them."""
    patch.setattr(Fences, "retire", lambda fences, retired: True)


@mutant("cache", field.FREED_EARLY)
def fence_waits_for_the_oldest_step_only(patch: Patch) -> None:
    """The first step to settle frees what a later one in flight still reads."""
    real = Fences.close

    def close(fences: Fences, fence: int) -> Any:
        fences._waiting = type(fences._waiting)((fence, retired) for _, retired in fences._waiting)
        return real(fences, fence)

    patch.setattr(Fences, "close", close)


@mutant("cache", field.AHEAD)
def commit_takes_allocated_for_settled(patch: Patch) -> None:
    """Tokens that are only allocated become reusable, before any step has written them."""
    real = KVCache.commit

    def commit(cache: KVCache, kvs: Any, tokens: Any) -> None:
        for kv, own in [(kvs, tokens)] if isinstance(kvs, RequestKV) else zip(kvs, tokens, strict=True):
            missing = cache.rows.allocated(kv) - len(own)
            real(cache, kv, np.append(own, np.zeros(missing, dtype=np.int32)))

    patch.setattr(KVCache, "commit", commit)


@mutant("cache", field.LEAK)
def tail_page_leaks(patch: Patch) -> None:
    """The last page of every request, full or in part, is lost."""
    real = KVCache._retire

    def retire(cache: KVCache, pages: Any = NO_PAGES, lease: Any = None, released: Any = ()) -> None:
        real(cache, pages if lease is None else pages[:-1], lease, released)

    patch.setattr(KVCache, "_retire", retire)


@mutant("cache", field.OFF_BY_ONE)
def match_returns_the_last_token_too(patch: Patch) -> None:
    """A prompt that is cached to its last token has nothing left to compute its output from."""
    real = KVCache.match

    def match(cache: KVCache, tokens: Any, namespace: Namespace = kv_cache.NAMESPACE, **limits: int) -> Any:
        return real(cache, np.append(tokens, np.int32(0)), namespace, **limits)

    patch.setattr(KVCache, "match", match)


@mutant("cache", field.STALE)
def page_ids_index_the_pool(patch: Patch) -> None:
    """Page ids are used where the pool is indexed by frames."""

    def page_table(rows: RunningTables, kvs: Any, num_tokens: Any, group: int = 0) -> Any:
        width = -(-int(num_tokens.max(initial=1)) // rows.page_size)
        return rows.pages[rows.rows_of(kvs), :width]

    patch.setattr(RunningTables, "page_table", page_table)


@mutant("cache", field.PARTIAL)
def extend_stops_half_way(patch: Patch) -> None:
    """Half of a batch gets its pages before the other half fails, and keeps them."""
    real = KVCache.extend

    def extend(cache: KVCache, kvs: Any, counts: Any) -> None:
        for kv, count in zip(kvs, counts, strict=True):
            real(cache, [kv], [count])

    patch.setattr(KVCache, "extend", extend)


@mutant("cache", field.LEAK)
def pages_leak_when_frames_run_out(patch: Patch) -> None:
    """A refused allocation still took its page ids; only the frames were missing."""
    real = Growth._make_room

    def make_room(growth: Growth, rows: Any, wanted: int, *rest: Any) -> None:
        try:
            real(growth, rows, wanted, *rest)
        except OutOfPages:
            pages = growth._parts.pages
            pages.alloc_pages(min(1, pages.num_free_pages))
            raise

    patch.setattr(Growth, "_make_room", make_room)


@mutant("cache", field.STUCK)
def evict_before_refusing(patch: Patch) -> None:
    """Everything cached is thrown away for a request that is refused anyway."""
    real = Growth._make_room

    def make_room(growth: Growth, rows: Any, wanted: int, *rest: Any) -> None:
        evicted = growth._offload.evict(max(0, wanted - growth._parts.pages.num_free_pages), 0, "")
        growth._counters.evicted(len(evicted.removed))
        real(growth, rows, wanted, *rest)

    patch.setattr(Growth, "_make_room", make_room)


@mutant("cache", field.STUCK)
def evictable_pages_do_not_count(patch: Patch) -> None:
    """A request that would fit after eviction is refused."""
    patch.setattr(PagedGroup, "num_evictable", property(lambda group: 0))


@mutant("cache", field.STALE)
def a_running_batch_is_not_read_again(patch: Patch) -> None:
    """Requests that run together go on from lengths that something else has changed, and write over each other."""
    real = KVCache.extend
    known: dict[Any, Any] = {}

    def extend(cache: KVCache, kvs: Any, counts: Any) -> None:
        lengths, together = cache.rows.num_allocated, isinstance(kvs, RunningBatch)
        if together and kvs in known:
            lengths[kvs.rows] = known[kvs]
        real(cache, kvs, counts)
        if together:
            known[kvs] = lengths[kvs.rows]

    patch.setattr(KVCache, "extend", extend)
