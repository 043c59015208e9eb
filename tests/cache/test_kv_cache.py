"""KVCache verb by verb, on caches small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from quire.cache import KVCache, RequestKV
from quire.errors import InvalidInput, LeaseError, OutOfPages
from quire.spec.events import Namespace
from quire.testing import small_plan


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def compute(cache: KVCache, tokens: np.ndarray, namespace: Namespace = Namespace()) -> RequestKV:  # noqa: B008
    """A request whose whole prompt has settled and is committed."""
    kv = cache.begin(tokens, namespace)
    cache.extend([kv], [len(tokens) - kv.num_cached])
    cache.commit(kv, tokens)
    return kv


def test_a_second_request_reuses_the_first_ones_pages() -> None:
    cache = KVCache(small_plan(8, 2))
    first = compute(cache, ids(1, 2, 3, 4, 5))
    second = cache.begin(ids(1, 2, 3, 4, 9))
    assert second.num_cached == 4
    assert cache.rows.page_ids(second).tolist() == cache.rows.page_ids(first)[:2].tolist()
    found = cache.statistics()
    assert (found.prompt_tokens, found.hit_tokens, found.shared_pages, found.peak_shared_pages) == (10, 4, 2, 2)
    cache.audit()


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    cache = KVCache(small_plan(8, 2))
    tokens = ids(1, 2, 3, 4, 5, 6)
    cache.finish(compute(cache, tokens), tokens)
    hit = cache.match(tokens[:length])
    assert (hit.num_tokens, hit.match.num_pages) == (cached, length // 2)


def test_an_empty_prompt_matches_nothing() -> None:
    cache = KVCache(small_plan(4, 2))
    assert cache.match(ids()).num_tokens == 0


def test_finishing_keeps_whole_pages_and_frees_the_tail() -> None:
    cache = KVCache(small_plan(8, 4))
    tokens = ids(*range(10))
    kv = cache.begin(tokens)
    cache.extend([kv], [18])
    cache.finish(kv, tokens)
    assert (cache.tree.num_pages, cache.pages.num_free_pages) == (2, 6)
    cache.audit()


def test_an_abort_keeps_what_was_committed_before() -> None:
    cache = KVCache(small_plan(8, 2))
    kv = compute(cache, ids(1, 2, 3))
    cache.extend([kv], [5])
    cache.finish(kv)
    assert (cache.tree.num_pages, cache.pages.num_free_pages) == (1, 7)


def test_a_finished_request_is_dead() -> None:
    cache = KVCache(small_plan(4, 2))
    kv = compute(cache, ids(1, 2))
    cache.finish(kv)
    for use in (cache.finish, cache.rows.allocated, cache.rows.page_ids, lambda kv: cache.extend([kv], [1])):
        with pytest.raises(LeaseError, match="finished"):
            use(kv)
    cache.audit()


def test_eviction_makes_room_beside_a_frame_that_is_set_apart() -> None:
    """Page ids are free then, and frames are not."""
    cache = KVCache(small_plan(4, 1))
    cache.groups[0].set_apart(int(cache.groups[0].frames.allocator.ids.take(1)[0]))
    tokens = ids(1, 2, 3)
    cache.finish(compute(cache, tokens), tokens)
    kv = cache.begin(ids(9))
    cache.extend([kv], [1])
    assert cache.statistics().evicted_pages == 1 and cache.pages.num_free_pages == 1
    batch = cache.rows.batch([kv])
    cache.extend(batch, 1)
    assert cache.statistics().evicted_pages == 2
    cache.audit()


def test_eviction_makes_room_only_as_far_as_needed() -> None:
    cache = KVCache(small_plan(4, 1))
    tokens = ids(1, 2, 3)
    cache.finish(compute(cache, tokens), tokens)
    kv = cache.begin(ids(9))
    cache.extend([kv], [2])
    assert cache.statistics().evicted_pages == 1
    assert cache.match(ids(1, 2, 3, 4)).num_tokens == 2


def test_one_eviction_is_for_what_all_that_run_want_in_four_steps() -> None:
    cache = KVCache(small_plan(1_100, 1))
    tokens = np.arange(1_090, dtype=np.int32)
    cache.finish(compute(cache, tokens), tokens)
    kvs = [cache.begin(ids(number)) for number in (2_000, 2_001, 2_002)]
    cache.extend(kvs[:1], [cache.pages.num_free_pages])
    batch = cache.rows.batch(kvs)
    evicted = []
    for _ in range(6):
        cache.extend(batch, 1)
        evicted.append(cache.statistics().evicted_pages)
    assert evicted == [11, 11, 11, 20, 20, 20], "of 1,090 pages at most one in 128 goes before it is needed"
    cache.audit()


def test_out_of_pages_names_numbers_and_holders_and_changes_nothing() -> None:
    cache = KVCache(small_plan(4, 1, context=8))
    tokens = ids(1, 2)
    cache.finish(compute(cache, tokens), tokens)
    kv = cache.begin(ids(9))
    before = cache.statistics()
    with pytest.raises(OutOfPages, match="needs 5 pages and has 2 free and 2 evictable; 1 running") as caught:
        cache.extend([kv], [5])
    assert (caught.value.group, caught.value.wanted, caught.value.free, caught.value.evictable) == ("full", 5, 2, 2)
    assert cache.statistics() == before
    cache.audit()


def test_a_request_beyond_its_row_is_refused_and_nothing_leaks() -> None:
    """The plan's context bounds a row. Who asks for more made a mistake, but no page may be lost by it."""
    cache = KVCache(small_plan(8, 1, context=4))
    kv = cache.begin(ids(1))
    with pytest.raises((AssertionError, InvalidInput)):
        cache.extend([kv], [5])
    assert cache.rows.allocated(kv) == 0
    cache.audit()


def test_a_shrinking_extension_changes_nothing() -> None:
    cache = KVCache(small_plan(4, 1))
    tokens = ids(1, 2, 3, 4)
    cache.finish(compute(cache, tokens), tokens)
    first, second = cache.begin(ids(7)), cache.begin(ids(8))
    with pytest.raises((AssertionError, InvalidInput)):
        cache.extend([first, second], [3, -1])
    assert cache.statistics().evicted_pages == 0
    cache.audit()


def test_extending_no_request_changes_nothing() -> None:
    cache = KVCache(small_plan(4, 2))
    cache.extend([], [])
    kv = cache.begin(ids(1))
    cache.extend([kv], [0])
    assert cache.pages.num_free_pages == 4


def test_rows_run_out_by_name() -> None:
    cache = KVCache(small_plan(4, 2, max_requests=1))
    cache.begin(ids(1))
    with pytest.raises(OutOfPages, match=r"needs a row.*1 running requests") as caught:
        cache.begin(ids(2))
    assert (caught.value.group, caught.value.wanted, caught.value.free) == ("rows", 1, 0)
    cache.audit()


@pytest.mark.parametrize("length", [1, 7])
def test_commit_outside_what_is_allocated_is_a_mistake(length: int) -> None:
    cache = KVCache(small_plan(4, 2))
    kv = compute(cache, ids(1, 2, 3))
    with pytest.raises(InvalidInput, match="cannot settle"):
        cache.commit(kv, ids(*range(length)))


def test_two_requests_that_compute_one_prefix_end_on_one_copy() -> None:
    cache = KVCache(small_plan(8, 2))
    tokens = ids(1, 2, 3, 4, 5)
    first, second = cache.begin(tokens), cache.begin(tokens)
    cache.extend([first, second], [5, 5])
    cache.commit(first, tokens)
    assert cache.pages.num_free_pages == 2
    cache.commit(second, tokens)
    assert cache.pages.num_free_pages == 4
    assert cache.rows.page_ids(second)[:2].tolist() == cache.rows.page_ids(first)[:2].tolist()
    assert cache.rows.page_ids(second)[2] != cache.rows.page_ids(first)[2]
    assert (cache.statistics().duplicate_pages, cache.statistics().shared_pages) == (2, 2)
    cache.audit()


def test_what_is_given_up_in_flight_moves_until_the_step_settles() -> None:
    cache = KVCache(small_plan(4, 1))
    kv = compute(cache, ids(1, 2, 3))
    cache.extend([kv], [1])
    fence = cache.open_fence()
    cache.finish(kv)
    frames = cache.statistics().frames["full"]
    assert (frames.free, frames.private, frames.cached, frames.moving) == (0, 0, 3, 1)
    assert cache.evict(9) == 0
    cache.audit()
    cache.close_fence(fence)
    assert cache.evict(9) == 3
    assert cache.pages.num_free_pages == 4


def test_an_error_in_one_of_what_waited_keeps_none_of_the_others() -> None:
    cache = KVCache(small_plan(11, 1))
    kvs = [compute(cache, ids(first, 2, 3)) for first in (1, 2, 3)]
    cache.extend(kvs[1:], [1, 1])
    fence = cache.open_fence()
    for kv in kvs:
        cache.finish(kv)
    cache.tree.release(kvs[0].lease)  # what only a fault would do: it waits for the step
    with pytest.raises(LeaseError):
        cache.close_fence(fence)
    assert cache.pages.num_free_pages == 2
    assert cache.evict(11) == 9
    assert cache.pages.num_free_pages == 11
    cache.audit()


def test_without_sharing_nothing_is_cached() -> None:
    cache = KVCache(small_plan(4, 1), share_prefixes=False)
    tokens = ids(1, 2, 3)
    cache.finish(compute(cache, tokens), tokens)
    assert cache.match(tokens).num_tokens == 0
    assert cache.pages.num_free_pages == 4


def test_namespaces_do_not_share() -> None:
    cache = KVCache(small_plan(12, 1))
    tokens = ids(1, 2, 3)
    compute(cache, tokens)
    for namespace in (Namespace("a"), Namespace(salt="a")):
        assert compute(cache, tokens, namespace).num_cached == 0
        assert cache.match(tokens, namespace).num_tokens == 2


def test_page_table_and_slots_agree() -> None:
    cache = KVCache(small_plan(8, 4))
    kvs = [compute(cache, ids(*range(6))), compute(cache, ids(*range(20, 23)))]
    table = cache.rows.page_table(kvs, np.array([6, 3]))
    assert table.shape == (2, 2)
    assert table[1, 1] == 0
    slots = cache.rows.slots(kvs, np.array([3, 1]), np.array([6, 3]))
    expected = [table[0, 0] * 4 + 3, table[0, 1] * 4, table[0, 1] * 4 + 1, table[1, 0] * 4 + 1, table[1, 0] * 4 + 2]
    assert slots.tolist() == expected
    assert slots.dtype == np.int32


def test_a_batch_names_each_request_once() -> None:
    cache = KVCache(small_plan(8, 4))
    kv = cache.begin(np.arange(4, dtype=np.int32))
    for verb in (lambda: cache.rows.batch([kv, kv]), lambda: cache.extend([kv, kv], [1, 1])):
        with pytest.raises(InvalidInput, match="twice"):
            verb()
    cache.audit()


def test_a_commit_of_several_settles_all_or_none() -> None:
    cache = KVCache(small_plan(8, 2, max_requests=4))
    kvs = [cache.begin(np.arange(4, dtype=np.int32) + 10 * at) for at in range(2)]
    cache.extend(kvs, [4, 4])
    tokens = [np.arange(4, dtype=np.int32), np.arange(6, dtype=np.int32)]
    with pytest.raises(InvalidInput, match="6 tokens cannot settle"):
        cache.commit(kvs, tokens)
    assert [cache.rows.committed(kv) for kv in kvs] == [0, 0]
    cache.audit()
    for kv in kvs:
        cache.finish(kv)
    cache.audit()


@pytest.mark.parametrize("tokens", [[1, 2, 3], np.array([1, 2, 3]), np.array([1, 2, 3], dtype=np.uint16)])
def test_tokens_of_another_type_are_refused(tokens: np.ndarray) -> None:
    cache = KVCache(small_plan(8, 2))
    for verb in (cache.match, cache.begin):
        with pytest.raises(InvalidInput, match="int32"):
            verb(tokens)
    kv = cache.begin(ids(1, 2, 3))
    cache.extend([kv], 3)
    with pytest.raises(InvalidInput, match="int32"):
        cache.commit(kv, tokens) if isinstance(tokens, np.ndarray) else cache.commit([kv], [tokens])
    cache.finish(kv, ids(1, 2, 3))
    cache.audit()


def test_a_request_without_a_row_is_told_of_rows() -> None:
    cache = KVCache(small_plan(8, 2, max_requests=1))
    cache.begin(ids(1, 2))
    with pytest.raises(OutOfPages, match="row") as found:
        cache.begin(ids(3, 4))
    assert "max_requests" in found.value.fix
