"""The audit itself: every law, broken on purpose, is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from quire.cache import KVCache
from quire.errors import AuditFailure
from quire.settings.tenants import TenantTerms, tenants_of
from quire.spec.group import ReachSpec
from quire.spec.ids import Tier
from quire.testing import small_plan
from tests.covering import each_of


def a_cache(tenants: Sequence[TenantTerms] = ()) -> tuple[KVCache, Any]:
    """One cached branch of two edges, a running request on it with a private page, free pages."""
    reaches = (ReachSpec(), ReachSpec("window", 3), ReachSpec("state"))
    plan = small_plan(10, 2, groups=("full", "window", "state"), reaches=reaches, frames=(10, 10, 10))
    cache = KVCache(plan, eviction="lru", tenants=tenants)
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6]):
        kv = cache.begin(np.array(tokens, dtype=np.int32))
        cache.extend([kv], [4 - kv.num_cached])
        run(cache, kv, 4)
        cache.finish(kv, np.array(tokens, dtype=np.int32))
    kv = cache.begin(np.array([1, 2, 3, 4, 7], dtype=np.int32))
    cache.extend([kv], [5 - kv.num_cached])
    run(cache, kv, 5)
    cache.audit()
    return cache, kv


def run(cache: KVCache, kv: Any, end: int) -> None:
    fence = cache.open_fence()
    cache.launch(2, [kv], np.array([end]))
    cache.close_fence(fence)


def nodes(cache: KVCache) -> list[Any]:
    return sorted(cache.tree.nodes(), key=lambda node: node.key)


def lose_a_page(cache: KVCache, kv: Any) -> None:
    cache.rows.pages[kv.row, 2] = 0


def own_a_page_twice(cache: KVCache, kv: Any) -> None:
    cache.rows.pages[kv.row, 2] = nodes(cache)[-1].pages[0]


def free_a_cached_page(cache: KVCache, kv: Any) -> None:
    cache.pages.free_pages(nodes(cache)[-1].pages)


def leak_a_page(cache: KVCache, kv: Any) -> None:
    cache.pages.alloc_pages(1)


def leak_a_frame(cache: KVCache, kv: Any) -> None:
    cache.groups[0].frames.allocator.alloc_pages(1)


def leak_a_carried_frame(cache: KVCache, kv: Any) -> None:
    carried(cache)._frame[kv.row] = 0


def carry_a_page_s_frame(cache: KVCache, kv: Any) -> None:
    column = carried(cache).table.frame
    carried(cache)._frame[kv.row] = column[column != 0][0]


def forget_a_pin(cache: KVCache, kv: Any) -> None:
    pins = cache.groups[1].table.pins
    pins[np.flatnonzero(pins)[0]] -= 1


def pin_twice(cache: KVCache, kv: Any) -> None:
    pins = cache.groups[1].table.pins
    pins[np.flatnonzero(pins)[0]] += 1


def forget_that_a_frame_is_idle(cache: KVCache, kv: Any) -> None:
    ticket = cache.groups[2].table.ticket
    ticket[np.flatnonzero(ticket)[0]] = 0


def miscount_idle_frames(cache: KVCache, kv: Any) -> None:
    cache.groups[2].table.num_idle += 1


def drop_a_frame_that_is_read(cache: KVCache, kv: Any) -> None:
    cache.groups[1].frames.drop(cache.rows.page_ids(kv)[-1:])


def drop_a_frame_of_a_whole_group(cache: KVCache, kv: Any) -> None:
    cache.groups[0].frames.drop(cache.rows.page_ids(kv)[:1])


def carried(cache: KVCache) -> Any:
    return cache.groups[2]


def bind_a_frame_twice(cache: KVCache, kv: Any) -> None:
    column = cache.parts.frames.of(Tier.DEVICE, 0).frame
    bound = np.flatnonzero(column)
    column[bound[0]] = column[bound[1]]


def bind_the_padding_page(cache: KVCache, kv: Any) -> None:
    cache.parts.frames.of(Tier.DEVICE, 0).frame[0] = 1


def commit_beyond_what_is_allocated(cache: KVCache, kv: Any) -> None:
    cache.rows.num_committed[kv.row] = 9


def commit_less_than_is_protected(cache: KVCache, kv: Any) -> None:
    cache.rows.num_committed[kv.row] = 1


def read_another_page_than_is_pinned(cache: KVCache, kv: Any) -> None:
    cache.rows.pages[kv.row, :2] = cache.rows.pages[kv.row, 1::-1].copy()


def miscount_leases(cache: KVCache, kv: Any) -> None:
    nodes(cache)[-1].leases += 1


def miscount_pages(cache: KVCache, kv: Any) -> None:
    cache.tree.num_pages += 1


def shorten_a_key(cache: KVCache, kv: Any) -> None:
    nodes(cache)[-1].key += b"0000"


def hang_a_child_elsewhere(cache: KVCache, kv: Any) -> None:
    node = nodes(cache)[0]
    first, child = node.children.popitem()
    node.children[first[::-1]] = child


def forget_to_queue(cache: KVCache, kv: Any) -> None:
    cache.tree.policy._queue._first.clear()
    cache.tree.policy._queue._rest.clear()


def keep_a_root(cache: KVCache, kv: Any) -> None:
    cache.tree.root(kv.namespace.__class__("unused"))


BREAKS: list[tuple[Callable[[KVCache, Any], None], str]] = [
    (lose_a_page, "no owner|owners"),
    (own_a_page_twice, "has 2 owners"),
    (free_a_cached_page, "has 2 owners|is free and has a frame"),
    (leak_a_page, "no owner"),
    (leak_a_frame, "frames"),
    (leak_a_carried_frame, "in use !="),
    (carry_a_page_s_frame, "serves two"),
    (forget_a_pin, "pins and"),
    (pin_twice, "pins and"),
    (forget_that_a_frame_is_idle, "idle"),
    (miscount_idle_frames, "miscounts"),
    (drop_a_frame_that_is_read, "reads a page that has no frame"),
    (drop_a_frame_of_a_whole_group, "is out and has no frame"),
    (bind_a_frame_twice, "serves two"),
    (bind_the_padding_page, "padding page"),
    (commit_beyond_what_is_allocated, "out of order"),
    (commit_less_than_is_protected, "out of order"),
    (read_another_page_than_is_pinned, "lease's path"),
    (miscount_leases, "leases and has"),
    (miscount_pages, "num_pages"),
    (shorten_a_key, "bytes of tokens"),
    (hang_a_child_elsewhere, "wrong place"),
    (forget_to_queue, "never be evicted"),
    (keep_a_root, "root is kept"),
]


@each_of(("breaks", "message"), BREAKS)
def test_a_broken_law_is_named(breaks: Callable[[KVCache, Any], None], message: str) -> None:
    cache, kv = a_cache()
    breaks(cache, kv)
    with pytest.raises(AuditFailure, match=message):
        cache.audit()


def count_a_row_to_another(tenants: Any, cache: KVCache, kv: Any) -> None:
    tenants.of_row[kv.row] = 1


def count_a_page_to_another(tenants: Any, cache: KVCache, kv: Any) -> None:
    tenants.owners.of_page[cache.rows.page_ids(kv)[-1]] = 1


def count_a_cached_page_to_another(tenants: Any, cache: KVCache, kv: Any) -> None:
    tenants.owners.of_page[nodes(cache)[-1].pages[0]] = 1


def count_an_edge_to_another(tenants: Any, cache: KVCache, kv: Any) -> None:
    nodes(cache)[-1].tenant = 1


def miscount_unheld_pages(tenants: Any, cache: KVCache, kv: Any) -> None:
    cache.tree.num_unheld[0] += 1


def miscount_frames(tenants: Any, cache: KVCache, kv: Any) -> None:
    tenants.tables[2].frames_by[1] += 1


def miscount_idle_frames_of_tenants(tenants: Any, cache: KVCache, kv: Any) -> None:
    tenants.tables[2].idle_by[0, 0] += 1


BROKEN_COUNTS: list[tuple[Callable[[Any, KVCache, Any], None], str]] = [
    (count_a_row_to_another, "row [0-9]+ is that of tenant 'default', and counted to 'quiet'"),
    (count_a_page_to_another, "page [0-9]+ is that of tenant 'default', and counted to 'quiet'"),
    (count_a_cached_page_to_another, "page [0-9]+ is that of tenant 'default', and counted to 'quiet'"),
    (count_an_edge_to_another, "an edge of tenant 'default' is counted to 'quiet'"),
    (miscount_unheld_pages, "tenant 'default': 2 cached pages without leases are counted, and there are 1"),
    (miscount_frames, "tenant 'quiet': 1 frames of 'state' are counted, and there are 0"),
    (miscount_idle_frames_of_tenants, "tenant 'default': [0-9]+ idle frames of 'state' are counted"),
]


@each_of(("breaks", "message"), BROKEN_COUNTS)
def test_what_is_counted_to_another_tenant_is_named(breaks: Callable[[Any, KVCache, Any], None], message: str) -> None:
    cache, kv = a_cache(tenants_of({"quiet": {}}))
    breaks(cache.parts.tenants, cache, kv)
    with pytest.raises(AuditFailure, match=message):
        cache.audit()
