"""What may go wrong below the device: loads without room, damaged records, and the paths that go with them."""

from __future__ import annotations

import pytest

from quire.errors import OutOfPages
from quire.tiers.moves import Link
from tests.cache.below_device import PAGE_SIZE, BelowDevice, prompt
from tests.tiers.dict_store import DictStore


def test_a_load_that_finds_no_room_on_its_link_leaves_the_request_waiting() -> None:
    """Nothing may begin on pages that are not on their way."""
    below = BelowDevice(16, 32, most_bytes={Link.LOAD: 1})
    first, second = prompt(1, 3), prompt(2, 3)
    below.cached(first, second)
    below.leave_device()
    kv = below.cache.begin(first)
    assert kv.num_cached == 3 * PAGE_SIZE
    before = below.cache.num_free_pages
    with pytest.raises(OutOfPages, match="'loads' needs 3"):
        below.cache.begin(second)
    below.cache.audit()
    assert below.cache.num_free_pages == before
    assert below.cache.match(second).num_tokens == 3 * PAGE_SIZE
    below.pass_time()
    again = below.cache.begin(second)
    below.pass_time()
    assert below.cache.is_ready(again)
    below.cache.finish(kv)
    below.cache.finish(again)
    below.come_to_rest()


def test_damaged_paths_with_pages_in_common_are_all_forgotten() -> None:
    """Two loads of one prefix fail; neither keeps what the other one has to forget."""
    below = BelowDevice(24, 48)
    stem = prompt(1, 2)[: 2 * PAGE_SIZE]
    first, second = prompt(2, 5, after=stem), prompt(3, 6, after=stem)
    below.cached(first, second)
    pages = [below.cache.match(tokens).pages for tokens in (first, second)]
    below.leave_device()
    below.spoil_host(int(pages[0][0]))
    below.spoil_host(int(pages[1][5]))
    kvs = [below.cache.begin(tokens) for tokens in (first, second)]
    below.pass_time(2.0)
    assert all(below.cache.has_failed(kv) for kv in kvs)
    assert below.cache.match(second).num_tokens == 0
    for kv in kvs:
        below.cache.finish(kv)
    below.come_to_rest()
    below.pass_time()
    assert not below.tiers.condemned and not below.tiers.num_bad
    assert below.tiers.counters.defects[("host", "digest")] == 2
    assert below.tiers.hosts[0].num_quarantined > 0
    below.cached(first, second)
    assert below.cache.match(first).num_tokens == 5 * PAGE_SIZE
    assert below.cache.match(second).num_tokens == 6 * PAGE_SIZE


def test_requests_elsewhere_go_on_while_a_damaged_path_is_held() -> None:
    """Only what would be cached behind what is damaged has to wait."""
    below = BelowDevice(24, 48)
    bad, good = prompt(1, 4), prompt(2, 3)
    below.cached(bad)
    pages = below.cache.match(bad).pages
    below.leave_device()
    below.spoil_host(int(pages[0]))
    waits = below.cache.begin(bad)
    below.pass_time()
    assert below.cache.has_failed(waits)
    again, other = below.compute(bad), below.compute(good)
    assert again.num_cached == 0
    assert again.lease.num_pages == 0
    assert other.lease.num_pages == 3
    below.cache.finish(waits)
    below.cache.finish(again)
    below.cache.finish(other)
    below.come_to_rest()
    assert not below.tiers.num_bad
    below.cached(bad)
    assert below.cache.match(bad).num_tokens == 4 * PAGE_SIZE


def test_a_record_that_is_damaged_before_it_is_stored_is_computed_again() -> None:
    """Storing finds the damage; whoever wants the page once it has left the device begins again, and heals it."""
    store = DictStore()
    below = BelowDevice(16, 32, store=store)
    tokens = prompt(1, 3)
    kv = below.compute(tokens)
    below.pass_time()  # saved, and on the way to the store
    pages = below.cache.match(tokens).pages
    below.spoil_host(int(pages[1]))
    below.cache.finish(kv, tokens)
    below.leave_device()
    below.come_to_rest()
    assert below.tiers.counters.defects[("host", "digest")] == 1
    assert len(store.visible) == 1  # what comes before it
    again = below.cache.begin(tokens)
    below.come_to_rest()
    while below.cache.has_failed(again):
        below.cache.finish(again)
        below.come_to_rest()
        again = below.cache.begin(tokens)
    below.cache.extend([again], [len(tokens) - again.num_cached])
    below.cache.commit(again, tokens)
    below.cache.finish(again, tokens)
    below.come_to_rest()
    assert not below.tiers.num_bad
    assert below.cache.match(tokens).num_tokens == 3 * PAGE_SIZE
    assert len(store.visible) == 3


def test_room_that_comes_back_from_a_damaged_path_is_told() -> None:
    """Whoever did not fit while it was held asks again."""
    below = BelowDevice(16, 32)
    tokens = prompt(1, 3)
    below.cached(tokens)
    below.leave_device()
    below.spoil_host(int(below.cache.match(tokens).pages[0]))
    kv = below.cache.begin(tokens)
    below.pass_time()
    assert below.cache.has_failed(kv)
    below.cache.finish(kv)
    before = below.cache.num_changes
    assert below.cache.settle_moves()
    assert below.cache.num_changes > before
    assert below.cache.num_available_pages == below.cache.pages.num_pages
