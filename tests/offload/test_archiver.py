"""What is on the host goes to storage by itself, whatever was in the way at first."""

from __future__ import annotations

import pytest

from quire.offload import archiver
from quire.offload.archiver import Archiver, PendingPaths
from quire.offload.tiering import Tiering
from quire.settings.fields import WritePolicy
from quire.spec.events import Namespace
from quire.tiers.store import StoreKey
from quire.tiers.transfer import Lane
from tests.offload.cached_bytes import ALICE, BOB, PAGE, tokens_of
from tests.offload.tiered_cache import TieredCache
from tests.tiers.scripted_store import ScriptedStore


def tiers_of(world: TieredCache) -> Tiering:
    return world.tiers


def archiver_of(world: TieredCache) -> Archiver:
    return tiers_of(world).archiver


def keys_of(world: TieredCache, pages: int, namespace: Namespace = ALICE) -> list[StoreKey]:
    """Of the first pages of the prompt 1, 2, 3 ..."""
    tiers, tokens = tiers_of(world), tokens_of(range(1, pages + 1))
    found = world.cache.tree.match(namespace, tokens).pages
    return [StoreKey(tiers.names.scope(namespace), key, 0) for key in tiers.names.keys_of(found)]


def test_what_the_link_had_no_room_for_goes_later() -> None:
    """A store half as fast as the prompt is computed."""
    size = TieredCache().copies.sizes[0]
    world = TieredCache(64, 128, seconds=0.1, most_bytes=dict.fromkeys((Lane.SAVE, Lane.ARCHIVE), 8 * size))
    world.mover._latency[Lane.ARCHIVE] = 2.0
    tokens = tokens_of(range(1, 49))
    kv = world.begin(tokens)
    for end in range(8 * PAGE, len(tokens) + 1, 8 * PAGE):
        world._compute(kv, tokens[:end], world.cache.rows.allocated(kv))
        world.cache.commit(kv, tokens[:end])
        until = world.now + 1.0
        while world.mover.next_end is not None and world.mover.next_end <= until:
            world.advance()
        world.now = until
        world.ahead.settle_moves()
    world.finish(kv, tokens)
    world.drain()
    assert world.stored() == 48
    assert not len(archiver_of(world).pending)
    world.close()


def test_a_copy_that_the_link_had_no_room_for_is_made_later() -> None:
    size = TieredCache().copies.sizes[0]
    world = TieredCache(64, 128, stores=False, seconds=5.0, most_bytes={Lane.SAVE: 8 * size})
    for first in (1, 21, 41):
        world.compute(tokens_of(range(first, first + 8)))
    world.drain()
    assert tiers_of(world).counters.saved_frames == 24
    world.close()


@pytest.mark.parametrize("method", ["prepare", "put", "complete"])
def test_what_the_store_refused_goes_when_it_takes_it(method: str) -> None:
    store = ScriptedStore()
    world = TieredCache(store=store, seconds=0.0)
    other = TieredCache(seconds=0.0)
    other.compute(tokens_of(range(1, 6)))
    store.refused[method].add(keys_of(other, 3)[2])
    world.compute(tokens_of(range(1, 6)))
    world.drain()
    assert world.stored() == 2
    tries = len(store.log)
    world.drain()
    assert len(store.log) == tries, "it is not tried again at once"
    assert not archiver_of(world).is_due
    store.refused[method].clear()
    world.now += 100
    assert archiver_of(world).is_due
    world.drain()
    assert world.stored() == 5
    assert not len(archiver_of(world).pending)
    world.close()


def test_a_store_that_is_down_is_asked_ever_less_often() -> None:
    store = ScriptedStore()
    world = TieredCache(store=store, seconds=0.0)
    store.failing.add("prepare")
    world.compute(tokens_of(range(1, 6)))
    for _ in range(1000):
        world.drain()
        world.now += 1
    asked = sum(name == "prepare" for name, _ in store.log)
    assert 10 < asked < 30
    store.failing.clear()
    archiver_of(world).hasten()
    world.drain()
    assert world.stored() == 5
    world.close()


def test_a_path_that_is_refused_keeps_no_other_waiting() -> None:
    store = ScriptedStore()
    world = TieredCache(24, 48, store=store, seconds=0.0)
    world.compute(tokens_of(range(1, 6)))
    store.refused["prepare"].update(keys_of(world, 5))
    for first in (21, 31):
        world.compute(tokens_of(range(first, first + 3)))
    for _ in range(8):
        world.drain()
        world.now += 100
    assert world.stored() == 6
    world.close()


def test_a_page_each_of_many_requests_is_one_move() -> None:
    world = TieredCache(24, 48, seconds=0.1)
    world.mover._latency[Lane.ARCHIVE] = 1.0
    for first in range(1, 11):
        world.compute(tokens_of((first,)))
    world.drain()
    assert world.stored() == 10
    assert tiers_of(world).counters.links["archive"].moves <= 4
    world.close()


def test_namespaces_do_not_share_a_move() -> None:
    world = TieredCache(24, 48)
    for first in range(1, 7):
        world.compute(tokens_of((first,)), (ALICE, BOB)[first % 2])
    world.drain()
    assert (world.stored(ALICE), world.stored(BOB)) == (3, 3)
    world.close()


def test_what_was_flushed_is_owed_no_more() -> None:
    store = ScriptedStore()
    world = TieredCache(store=store, seconds=0.0)
    tokens = tokens_of(range(1, 6))
    world.compute(tokens)
    store.refused["put"].update(keys_of(world, 5))
    world.drain()
    assert len(archiver_of(world).pending) == 1
    kv = world.begin(tokens[: 3 * PAGE])
    world.flush(ALICE)
    store.refused["put"].clear()
    for _ in range(3):
        world.drain()
        world.now += 100
    assert world.stored() == 0 and not len(archiver_of(world).pending)
    world.finish(kv)
    world.close()


def test_of_what_left_the_cache_the_rest_is_owed() -> None:
    store = ScriptedStore()
    world = TieredCache(store=store, seconds=0.0)
    tokens = tokens_of(range(1, 6))
    world.compute(tokens)
    keys = keys_of(world, 5)
    store.refused["put"].update(keys)
    world.drain()
    world.demote()
    tiers_of(world).evict_host(2)
    assert world.cached(tokens) == 3 * PAGE
    store.refused["put"].clear()
    world.now += 100
    world.drain()
    assert set(store.visible) == set(keys[:3])
    world.close()


def test_what_is_pending_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert archiver._MOST_PATHS == 4_096
    monkeypatch.setattr(archiver, "_MOST_PATHS", 64)
    world = TieredCache(12, 24, seconds=0.0)
    tree = world.cache.tree
    pending = PendingPaths(tree)
    for number in range(80):
        world.compute(tokens_of((number, number)))
        pending.add(tree.match(ALICE, tokens_of((number, number))).path[-1])
        world.drain()
    assert len(pending) == 64
    pending.removed(100)
    assert len(pending) <= 24
    world.close()


def restarted(world: TieredCache) -> TieredCache:
    return TieredCache(40, 80, store=world.store, seconds=0.1)


@pytest.mark.parametrize("pause", [0.0, 150.0])
def test_what_is_always_asked_for_stays_stored(pause: float) -> None:
    """A session with a turn every round never leaves the device; beside it come prompts that do not return."""
    size = TieredCache().copies.sizes[0]
    world = TieredCache(40, 80, store=ScriptedStore(60 * size), seconds=0.1)
    for turn in range(1, 31):
        world.compute(tokens_of(range(1, turn + 1)))
        world.drain()
        world.compute(tokens_of(range(1_000 + 4 * turn, 1_004 + 4 * turn)))
        world.drain()
        world.now += pause
    again = restarted(world)
    assert again.fetch(tokens_of(range(1, 31))) == 30 * PAGE
    assert again.cached(tokens_of(range(1_004, 1_008))) == 0 == again.fetch(tokens_of(range(1_004, 1_008)))
    again.close()


def test_what_the_store_has_lost_is_stored_again() -> None:
    world = TieredCache(40, 80, seconds=0.1)
    tokens = tokens_of(range(1, 6))
    world.compute(tokens)
    world.drain()
    keys = keys_of(world, 5)
    world.store.remove(keys[1:3])
    assert world.compute(tokens) > 0
    world.drain()
    assert set(world.store.visible) == {keys[0], *keys[3:]}, "it was told of all of them a moment ago"
    world.now += 1_000
    world.compute(tokens)
    world.drain()
    assert set(world.store.visible) == set(keys)
    assert tiers_of(world).counters.lost_frames == 2
    assert restarted(world).fetch(tokens) == len(tokens)
    world.close()


def test_who_was_fetched_behind_something_tells_of_that_too() -> None:
    """The head of a path is in the cache for good, and what hangs behind it comes from the store."""
    store = ScriptedStore()
    first = TieredCache(40, 80, store=store, seconds=0.1)
    first.compute(tokens_of(range(1, 7)))
    first.drain()
    keys = keys_of(first, 6)
    world = TieredCache(40, 80, store=store, seconds=0.1)
    world.compute(tokens_of(range(1, 4)))
    world.drain()
    world.now += 1_000
    assert world.fetch(tokens_of(range(1, 7))) == 6 * PAGE
    world.drain()
    assert store.by_use() == keys[::-1], "the head of a prefix was used last"
    world.close()


def test_what_is_of_use_is_told_once_in_a_while() -> None:
    world = TieredCache(40, 80, seconds=0.0)
    for _ in range(50):
        world.compute(tokens_of(range(1, 6)))
        world.drain()
        world.now += 1
    asked = sum(count for name, count in world.store.log if name == "prepare")
    assert asked == 5
    world.now += 1_000
    for _ in range(5):
        world.compute(tokens_of(range(1, 6)))
        world.drain()
    asked = sum(count for name, count in world.store.log if name == "prepare")
    assert asked == 5 + 5
    world.close()


def test_a_store_that_is_too_small_for_a_path_comes_to_rest() -> None:
    size = TieredCache().copies.sizes[0]
    world = TieredCache(40, 4, store=ScriptedStore(2 * size), seconds=0.1)
    for _ in range(10):
        world.compute(tokens_of(range(1, 5)))
        for _ in range(100):
            if not world.advance():
                break
        else:
            raise AssertionError("it writes for ever")
        world.now += 1_000
    world.close()


def test_what_is_behind_a_gap_is_stored_when_that_is_closed() -> None:
    world = TieredCache(write=WritePolicy.SELECTIVE)
    tokens = tokens_of((1, 2))
    world.compute(tokens)
    world.compute(tokens_of((1, 3)))
    world.drain()
    match = world.cache.tree.match(ALICE, tokens)
    end = match.path[-1]
    assert end.parent is not None
    before = world.stored()
    tiers_of(world).evict_host(10)
    world.store.visible.clear()
    tiers_of(world).archiver.store_is_empty()
    assert tiers_of(world).save(end, match.pages, ends=(2,), first=1) is not None
    world.drain()
    assert (before, world.stored()) == (1, 0), "no lookup would find it"
    assert tiers_of(world).save(end.parent, match.pages[:1], ends=(1,)) is not None
    world.drain()
    assert world.stored() == 2
    world.close()


def test_what_is_owed_may_go_while_it_is_read() -> None:
    """Making room on the host for one path evicts others that have pages to write back."""
    world = TieredCache(12, 24, seconds=0.0)
    tree = world.cache.tree
    pending = PendingPaths(tree)
    for number in range(4):
        world.compute(tokens_of((number, number)))
        pending.add(tree.match(ALICE, tokens_of((number, number))).path[-1])
    world.drain()
    found = 0
    for _ in pending.first(8):
        found += 1
        world.cache.evict(world.cache.pages.num_pages)
        while tiers_of(world).evict_host(world.cache.pages.num_pages):
            pass
        pending.removed(5_000)
    assert found == 1 and not len(pending)
    world.close()
