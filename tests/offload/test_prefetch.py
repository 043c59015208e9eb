"""Reading ahead for requests whose pages are cached, and whose windows or states are in the store only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from typing_extensions import Buffer

from quire.offload import prefetch as fetched_pieces
from quire.offload import prefetcher as reading_ahead
from quire.offload.prefetch import Prefetch
from quire.offload.tiering import Tiering
from quire.settings.fields import PrefetchPolicy
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids
from quire.tiers.store import Answer, StoreKey
from quire.tiers.transfer import Lane
from tests.clear import clear
from tests.offload.cached_bytes import ALICE, FULL, PAGE, STATE, WINDOW, asking, tokens_of
from tests.offload.tiered_cache import TieredCache
from tests.tiers.scripted_store import ScriptedStore

MODELS = [(FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE), (WINDOW,), (STATE,)]
NEEDED = {"full": 0, "window": 2, "state": 1}
"""Frames behind which a request begins, of pages that are cached: six tokens reach back to two pages."""
TOKENS = tokens_of((1, 2, 3, 4, 5))


def tiers_of(world: TieredCache) -> Tiering:
    return world.tiers


def drop_parts(world: TieredCache) -> None:
    """Windows and states leave device and host; the pages stay."""
    world.drain()
    for group, host in zip(world.cache.groups, tiers_of(world).hosts, strict=True):
        group.evict(group.num_frames)
        host.evict(host.num_frames)
    world.cache.audit()


def forget(world: TieredCache) -> None:
    """Everything leaves device and host."""
    world.drain()
    world.cache.evict(world.cache.pages.num_pages)
    while tiers_of(world).evict_host(world.cache.pages.num_pages):
        pass


def begun(world: TieredCache, tokens: Ids) -> Prefetch:
    found = world.ahead.prefetch(asking(tokens), ALICE)
    assert found is not None
    return found


def links_of(prefetch: Prefetch) -> list[Lane]:
    """Of what is under way for it."""
    return [move.lane for move in prefetch.moves]


def key_of(world: TieredCache, place: int, group: int, tokens: Ids = TOKENS) -> StoreKey:
    """Of the record of a cached page."""
    page = world.cache.tree.match(ALICE, tokens).pages[place : place + 1]
    return StoreKey(tiers_of(world).names.scope(ALICE), tiers_of(world).names.keys_of(page)[0], group)


@pytest.mark.parametrize("reaches", MODELS)
def test_what_cached_pages_lack_comes_from_the_store(reaches: tuple[ReachSpec, ...]) -> None:
    world = TieredCache(reaches=reaches)
    world.compute(TOKENS)
    drop_parts(world)
    assert world.cached(TOKENS) == 0
    assert world.fetch(TOKENS) == len(TOKENS)
    counters = tiers_of(world).counters
    assert counters.fetched_frames == sum(NEEDED[reach.kind] for reach in reaches), "and nothing else"
    assert counters.fetched_bytes == sum(
        NEEDED[reach.kind] * size for reach, size in zip(reaches, world.copies.sizes, strict=True)
    )
    world.cache.audit()
    assert world.compute(asking(TOKENS)) == len(TOKENS)
    assert (counters.storage_hit_tokens, counters.host_hit_tokens) == (len(TOKENS), 0)
    assert world.compute(asking(TOKENS)) == len(TOKENS)
    assert counters.storage_hit_tokens == len(TOKENS), "it counts once"
    world.close()


@pytest.mark.parametrize("reaches", MODELS)
def test_who_can_begin_at_the_end_asks_nothing(reaches: tuple[ReachSpec, ...]) -> None:
    world = TieredCache(reaches=reaches)
    world.compute(TOKENS)
    world.drain()
    for _ in range(2):
        assert world.cached(TOKENS) == len(TOKENS)
        assert world.ahead.prefetch(asking(TOKENS), ALICE) is None and world.mover.idle
        for group in world.cache.groups:
            group.evict(group.num_frames)  # on the host only
    world.close()


@pytest.mark.parametrize("reaches", MODELS[:3])
@pytest.mark.parametrize("piece", [1, 8 << 20])
def test_a_prompt_that_is_cached_in_part_gets_all_that_is_stored(
    reaches: tuple[ReachSpec, ...], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are cached lack what is read in part, those behind them everything."""
    monkeypatch.setattr(fetched_pieces, "PIECE_BYTES", piece)
    world = TieredCache(reaches=reaches)
    world.compute(TOKENS)
    forget(world)
    world.compute(TOKENS[: 4 * PAGE])
    drop_parts(world)
    assert world.fetch(TOKENS) == len(TOKENS)
    assert tiers_of(world).counters.fetched_frames == 1 + sum(NEEDED[reach.kind] for reach in reaches)
    world.cache.audit()
    assert world.compute(asking(TOKENS)) == len(TOKENS)
    world.close()


def test_only_what_need_not_be_computed_counts_as_gain() -> None:
    """Behind two of five pages it can begin already."""
    world = TieredCache(reaches=(FULL, STATE), always=False, seconds=0.001)
    world.compute(TOKENS)
    drop_parts(world)
    tiers = tiers_of(world)
    even, pages = tiers.break_even, world.cache.tree.match(ALICE, TOKENS).pages
    even.computed(1000 * PAGE, 1000.0)  # a page takes a second
    even.moved(Lane.FETCH, world.copies.sizes[1], 4.0)
    tiers.hosts[1].bind(pages[1:2], tiers.hosts[1].take(1))
    assert world.fetch(TOKENS) == 2 * PAGE, "three pages are computed sooner"
    assert tiers.counters.declined_tokens == 3 * PAGE
    tiers.hosts[1].drop(pages[1:2])
    assert world.fetch(TOKENS) == len(TOKENS), "five are not"
    world.close()


def test_what_it_counts_on_stays_while_the_rest_comes() -> None:
    """The host has one of two pages of a window, and no room but where others' are, and that one."""
    world = TieredCache(reaches=(FULL, WINDOW), hosts=(24, 4))
    world.compute(TOKENS)
    drop_parts(world)
    tiers = tiers_of(world)
    assert world.fetch(TOKENS) == len(TOKENS)
    pages = world.cache.tree.match(ALICE, TOKENS).pages
    assert tiers.hosts[1].table.present(pages).tolist() == [False, False, False, True, True]
    tiers.hosts[1].drop(pages[4:])
    others = tokens_of((6, 7, 8))
    world.compute(others)
    world.drain()
    assert tiers.hosts[1].num_free <= 1, "others have the rest"
    world.cache.groups[1].evict(12)
    prefetch = begun(world, TOKENS)
    assert world.advance() and links_of(prefetch) == [Lane.FETCH]
    world.cache.audit()
    assert tiers.host_room(tiers.hosts[1], 4) < 4 and tiers.hosts[1].table.present(pages[3:4]).all()
    while world.ahead.is_awaited(prefetch):
        assert world.advance()
    assert world.cached(TOKENS) == len(TOKENS)
    world.cache.audit()
    world.ahead.stop_prefetch(prefetch)
    assert tiers.hosts[1].table.reclaims and tiers.hosts[1].table.num_pinned == 0
    world.close()


def test_where_a_state_is_damaged_the_one_before_it_is_fetched() -> None:
    world = TieredCache(reaches=(FULL, STATE))
    world.compute(TOKENS)
    drop_parts(world)
    damaged = key_of(world, 4, 1)
    record = bytearray(world.store.visible[damaged])
    record[-1] ^= 1
    world.store.visible[damaged] = bytes(record)
    assert world.fetch(TOKENS) == 4 * PAGE
    assert dict(tiers_of(world).counters.defects) == {("storage", "digest"): 1}
    assert damaged not in world.store.visible
    assert world.compute(asking(TOKENS)) == 4 * PAGE
    world.drain()
    assert damaged in world.store.visible, "it is stored anew"
    world.close()


def test_what_the_store_has_forgotten_is_stored_anew() -> None:
    world = TieredCache(reaches=(FULL, STATE))
    world.compute(TOKENS)
    drop_parts(world)
    gone = [key for key in world.store.visible if key.part == 1]
    for key in gone:
        del world.store.visible[key]
    assert world.fetch(TOKENS) == 0
    assert world.compute(TOKENS) == 0
    world.drain()
    assert set(gone) <= set(world.store.visible)
    drop_parts(world)
    assert world.fetch(TOKENS) == len(TOKENS)
    world.close()


def test_where_a_page_is_damaged_the_state_before_it_is_fetched() -> None:
    """Of pages that are not cached; without that state, those before the damage would be there for nothing."""
    world = TieredCache(reaches=(FULL, STATE))
    world.compute(TOKENS[: 3 * PAGE])
    world.compute(TOKENS)
    world.drain()
    damaged = key_of(world, 3, 0)
    record = bytearray(world.store.visible[damaged])
    record[-1] ^= 1
    world.store.visible[damaged] = bytes(record)
    forget(world)
    assert world.fetch(TOKENS) == 3 * PAGE
    world.cache.audit()
    counters = tiers_of(world).counters
    assert dict(counters.defects) == {("storage", "digest"): 1} and counters.fetched_frames == 4
    assert world.compute(asking(TOKENS)) == counters.storage_hit_tokens == 3 * PAGE
    world.close()


def test_a_store_that_cannot_answer_now_is_not_asked_for_less() -> None:
    world = TieredCache(reaches=(FULL, STATE))
    world.compute(TOKENS)
    drop_parts(world)
    world.store.refused["get"].add(key_of(world, 4, 1))
    assert world.fetch(TOKENS) == 0
    world.close()


@pytest.mark.parametrize("reaches", MODELS)
@pytest.mark.parametrize("link", [Lane.LOOK, Lane.FETCH])
@pytest.mark.parametrize("kind", ["flush", "epoch", "clear"])
def test_what_was_flushed_meanwhile_counts_for_nothing(reaches: tuple[ReachSpec, ...], link: Lane, kind: str) -> None:
    world = TieredCache(reaches=reaches)
    world.compute(TOKENS)
    world.drain()
    last = world.cache.tree.match(ALICE, TOKENS).pages[4:]
    for group, host in zip(world.cache.groups, tiers_of(world).hosts, strict=True):
        if not group.reach.whole:
            group.frames.drop(last)
            host.drop(last)  # of a window, the host has the other page
    prefetch = begun(world, TOKENS)
    while link not in links_of(prefetch):
        assert world.advance()
    if kind == "flush":
        world.flush(ALICE)
    elif kind == "epoch":
        world.set_epoch(1)
    else:
        clear(world.cache)
    world.drain()
    world.cache.audit()
    assert prefetch.done and tiers_of(world).counters.fetched_frames == 0
    found = world.compute(TOKENS)
    assert found < len(TOKENS) if kind == "clear" else not found, "what it held itself is not cleared"
    world.close()


def test_nothing_is_fetched_for_a_damaged_path() -> None:
    world = TieredCache(reaches=(FULL, STATE))
    world.compute(TOKENS)
    drop_parts(world)
    prefetch = begun(world, TOKENS)
    pages = world.cache.tree.match(ALICE, TOKENS).pages
    tiers_of(world).damaged.mark(pages[1:2])
    while not prefetch.done:
        assert world.advance()
    assert tiers_of(world).counters.fetched_frames == 0
    assert world.ahead.prefetch(asking(TOKENS), ALICE) is None
    tiers_of(world).damaged.mend(pages)
    world.close()


def test_what_would_leave_no_frame_to_go_on_in_is_not_fetched() -> None:
    world = TieredCache(reaches=(FULL, STATE), frames=(12, 1))
    world.compute(TOKENS)
    drop_parts(world)
    assert world.fetch(TOKENS) == 0 and tiers_of(world).counters.fetched_frames == 0
    world.close()


def test_requests_with_the_same_prompt_wait_for_one_fetch() -> None:
    world = TieredCache(reaches=(FULL, WINDOW))
    world.compute(TOKENS[: 3 * PAGE])
    world.compute(TOKENS)
    drop_parts(world)
    first = begun(world, TOKENS)
    assert begun(world, TOKENS) is first and first.num_waiting == 2
    other = begun(world, TOKENS[: 3 * PAGE])
    assert other is not first, "it needs another window"
    while not (first.done and other.done):
        assert world.advance()
    assert tiers_of(world).counters.fetched_frames == 4
    assert world.cached(TOKENS) == len(TOKENS)
    world.close()


def test_a_fetch_ends_when_its_link_is_off_and_no_request_waits() -> None:
    world = TieredCache(always=False)
    world.compute(TOKENS)
    forget(world)
    prefetch = begun(world, TOKENS)
    assert begun(world, TOKENS) is prefetch
    while Lane.FETCH not in links_of(prefetch):
        assert world.advance()
    even = tiers_of(world).break_even
    even.computed(1000, 1e-6)
    even.moved(Lane.FETCH, 1, 10.0)
    while not even.why_off(Lane.FETCH):
        even.decide(Lane.FETCH, 1, 1)
    assert not world.ahead.is_awaited(prefetch) and prefetch.stopped and prefetch.moves[0].stopping
    world.now += 0.4
    world.drain()
    assert prefetch.done and world.cached(TOKENS) < len(TOKENS)
    for _ in range(2):
        world.ahead.stop_prefetch(prefetch)
    world.close()


def test_a_store_that_hangs_is_waited_for_no_longer_than_its_deadline() -> None:
    """Its frames stay taken: the call may still come back and write to them."""
    world = stored_only()
    world.latency[Lane.FETCH] = math.inf
    prefetch = begun(world, TOKENS)
    assert world.advance() and links_of(prefetch) == [Lane.FETCH] and world.ahead.is_awaited(prefetch)
    assert world.advance() and world.now > Lane.FETCH.deadline_s
    assert not world.ahead.is_awaited(prefetch) and prefetch.stopped and not prefetch.done
    world.ahead.stop_prefetch(prefetch)
    world.cache.audit()
    assert world.compute(TOKENS) == 0 and not world.mover.idle


def stored_only(reaches: tuple[ReachSpec, ...] = (FULL,), host: int = 24) -> TieredCache:
    """A cache that was restarted: `TOKENS` are in the store."""
    before = TieredCache(reaches=reaches)
    before.compute(TOKENS)
    before.drain()
    return TieredCache(reaches=reaches, store=before.store, host=host)


def fetched(world: TieredCache, tokens: Ids = TOKENS) -> Prefetch:
    prefetch = begun(world, tokens)
    while world.ahead.is_awaited(prefetch):
        assert world.advance()
    return prefetch


def press(world: TieredCache) -> None:
    """Others come and go, more than device and host hold."""
    for first in range(100, 200, 10):
        world.compute(tokens_of(range(first, first + 6)))
        world.drain()


@pytest.mark.parametrize("reaches", MODELS)
def test_what_was_fetched_is_held_until_its_request_begins(reaches: tuple[ReachSpec, ...]) -> None:
    world = stored_only(reaches)
    prefetch = fetched(world)
    press(world)
    world.cache.audit()
    assert world.cached(TOKENS) == len(TOKENS), "others make room elsewhere"
    assert world.compute(asking(TOKENS)) == len(TOKENS)
    world.ahead.stop_prefetch(prefetch)
    assert world.prefetcher is not None and not world.prefetcher._holding
    press(world)
    assert world.cached(TOKENS) == 0, "no lease holds it any more"
    world.close()


def test_it_is_held_until_the_last_of_several_has_begun() -> None:
    world = stored_only()
    prefetch = begun(world, TOKENS)
    assert begun(world, TOKENS) is prefetch
    world.drain()
    world.ahead.stop_prefetch(prefetch)
    press(world)
    assert world.cached(TOKENS) == len(TOKENS)
    world.ahead.stop_prefetch(prefetch)
    assert world.cache.tree.num_protected == 0
    world.close()


@pytest.mark.parametrize("kind", ["flush", "epoch", "clear", "bad"])
def test_what_is_to_be_forgotten_is_not_held(kind: str) -> None:
    world = stored_only((FULL, WINDOW))
    prefetch = fetched(world)
    pages = world.cache.tree.match(ALICE, TOKENS).pages
    if kind == "flush":
        world.flush(ALICE)
    elif kind == "epoch":
        world.set_epoch(1)
    elif kind == "clear":
        clear(world.cache)
    else:
        tiers_of(world).damaged.mark(pages[:1])
        assert world.prefetcher is not None
        world.prefetcher.release_damaged()
        tiers_of(world).damaged.mend(pages)
    assert prefetch.hold.released and world.prefetcher is not None and not world.prefetcher._holding
    world.cache.audit()
    world.ahead.stop_prefetch(prefetch)
    world.close()


def test_who_runs_takes_what_is_held_from_the_last_one_first() -> None:
    before = TieredCache()
    prompts = [tokens_of((first, first + 1, first + 2)) for first in (1, 11, 21)]
    for tokens in prompts:
        before.compute(tokens)
    before.drain()
    world = TieredCache(store=before.store)
    for tokens in prompts:
        world.compute(tokens[: 2 * PAGE])
    world.drain()
    held = [fetched(world, tokens) for tokens in prompts]
    kv = world.cache.begin(tokens_of(range(40, 49)), ALICE)
    world.cache.extend([kv], 9 * PAGE)  # of twelve, and six are held
    assert [prefetch.hold.released for prefetch in held] == [False, True, True]
    world.cache.audit()
    world.cache.finish(kv)
    for prefetch in held:
        world.ahead.stop_prefetch(prefetch)
    world.close()


def test_no_fetch_begins_where_others_hold_most_of_the_host() -> None:
    world = stored_only(host=8)
    prefetch = fetched(world)
    assert prefetch.limit == 5 and not world.ahead.can_prefetch
    world.ahead.stop_prefetch(prefetch)
    assert world.ahead.can_prefetch
    world.close()


def test_frames_of_one_store_serve_another_cache() -> None:
    """What another process stored of windows and states is found for pages that this one has computed."""
    first = TieredCache(reaches=(FULL, WINDOW, STATE))
    first.compute(TOKENS)
    first.drain()
    world = TieredCache(reaches=(FULL, WINDOW, STATE), store=first.store)
    longer = np.concatenate((TOKENS, tokens_of((9,))))
    world.compute(longer)
    drop_parts(world)
    assert world.fetch(TOKENS) == len(TOKENS)
    first.close()
    world.close()


class FailingStore(ScriptedStore):
    """It says what it has, and then gives nothing; or it does not say it either."""

    failure = ""

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        return [Answer.RETRY] * len(keys) if self.failure == "exists" else super().exists(keys)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        if self.failure in ("RETRY", "MISS"):
            return [Answer[self.failure]] * len(keys)
        if self.failure == "error":
            raise OSError("no answer")
        return super().get(keys, records)


@pytest.mark.parametrize("failure", ["exists", "RETRY", "MISS", "error"])
def test_a_store_that_brings_nothing_is_left_alone_and_found_again(failure: str) -> None:
    """Each prompt takes a second; the store says that it has it, and is waited for."""
    store = FailingStore()
    world = TieredCache(always=False, prefetch=PrefetchPolicy.BREAK_EVEN, store=store, seconds=0.01)
    even, counters = tiers_of(world).break_even, tiers_of(world).counters
    even.computed(1000 * len(TOKENS), 1000.0)
    world.compute(TOKENS)
    forget(world)
    assert world.fetch(TOKENS) == len(TOKENS), "while it works"
    store.failure = failure
    world.latency[Lane.LOOK if failure == "exists" else Lane.FETCH] = 2.0
    waits = []
    for _ in range(50):
        forget(world)
        began = world.now
        assert world.fetch(TOKENS) == 0
        waits.append(world.now - began)
        world.drain()
    assert len([wait for wait in waits if wait]) == 3 and max(waits) <= 4.0
    assert even.why_off(Lane.FETCH) and "less than half" in even.why_off(Lane.FETCH)
    assert counters.failed_moves == 3
    store.failure = ""
    world.latency[Lane.FETCH] = world.latency[Lane.LOOK] = 0.01
    found = []
    for _ in range(10):
        forget(world)
        world.now += 100.0
        found.append(world.fetch(TOKENS))
        world.drain()
    assert found[2:] == [len(TOKENS)] * 8 and not even.why_off(Lane.FETCH)
    world.close()


def test_a_look_that_takes_longer_than_computing_is_a_loss() -> None:
    world = TieredCache(always=False, prefetch=PrefetchPolicy.BREAK_EVEN, seconds=0.01)
    even = tiers_of(world).break_even
    even.computed(1000 * len(TOKENS), 1000.0)
    world.compute(TOKENS)
    forget(world)
    world.latency[Lane.LOOK] = 5.0
    for _ in range(20):
        forget(world)
        assert world.fetch(TOKENS) == 0
        world.drain()
    assert "at any bandwidth" in even.why_off(Lane.FETCH)
    assert world.ahead.prefetch(asking(TOKENS), ALICE) is None and world.mover.idle
    world.close()


def test_a_trial_that_finds_nothing_stored_leaves_it_to_the_next() -> None:
    world = TieredCache(always=False, prefetch=PrefetchPolicy.BREAK_EVEN, seconds=0.01)
    even = tiers_of(world).break_even
    even.computed(1000 * len(TOKENS), 1000.0)
    world.compute(TOKENS)
    forget(world)
    for _ in range(3):
        even.failed(Lane.FETCH, 0.1)
    world.now += 100.0
    others = begun(world, tokens_of((7, 8, 9, 10, 11)))
    assert world.ahead.prefetch(asking(TOKENS), ALICE) is None, "one at a time"
    while not others.done:
        assert world.advance()
    assert world.fetch(TOKENS) == len(TOKENS)
    world.close()


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Each page is a piece."""
    monkeypatch.setattr(fetched_pieces, "PIECE_BYTES", 1)
    return monkeypatch


def test_several_pieces_are_on_their_way_at_once(single: pytest.MonkeyPatch) -> None:
    world = stored_only()
    prefetch = begun(world, TOKENS)
    assert world.advance() and links_of(prefetch) == [Lane.FETCH] * 5
    world.cache.audit()
    assert world.advance() and prefetch.limit == 1, "each counts when it has come"
    world.now += 10  # a long step
    world.ahead.settle_moves()
    assert prefetch.done and world.cached(TOKENS) == len(TOKENS)
    world.close()


def test_more_is_in_flight_where_all_has_come_by_the_next_look(single: pytest.MonkeyPatch) -> None:
    single.setattr(reading_ahead, "_FIRST_BYTES", 1)
    world = stored_only()
    prefetch = begun(world, TOKENS)
    assert world.advance() and len(prefetch.pieces) == 1
    window, steps = 1, 0
    while world.ahead.is_awaited(prefetch):
        assert prefetch.at_once == window
        world.now += 10
        world.ahead.settle_moves()
        window, steps = 2 * window, steps + 1
    assert prefetch.limit == 5 and steps <= 5
    world.close()


@pytest.mark.parametrize(("window", "seconds"), [(24, 50.0), (1 << 20, 5.0)])
def test_a_fetch_is_as_fast_as_it_is_for_those_who_wait(
    window: int, seconds: float, single: pytest.MonkeyPatch
) -> None:
    """A piece takes a second, and a step ten: each in one, or all at once."""
    single.setattr(reading_ahead, "_FIRST_BYTES", window)
    single.setattr(reading_ahead, "_MOST_BYTES", window)
    world = stored_only()
    prefetch = begun(world, TOKENS)
    assert world.advance()
    while not prefetch.done:
        world.now += 10
        world.ahead.settle_moves()
    rate = tiers_of(world).break_even._lanes[Lane.FETCH].rate
    assert rate.mean == 5 * world.copies.sizes[0] / seconds
    world.close()


def test_who_finds_the_link_full_goes_on_when_there_is_room(single: pytest.MonkeyPatch) -> None:
    others = tokens_of((11, 12, 13))
    before = TieredCache()
    for tokens in (TOKENS, others):
        before.compute(tokens)
    before.drain()
    world = TieredCache(store=before.store, most_bytes={Lane.FETCH: 1})
    prefetches = [begun(world, tokens) for tokens in (TOKENS, others)]
    assert world.advance() and world.advance()
    assert world.prefetcher is not None and world.prefetcher.in_flight == tuple(prefetches)
    world.drain()
    assert [world.cached(tokens) for tokens in (TOKENS, others)] == [len(TOKENS), len(others)]
    world.close()


@pytest.mark.parametrize("place", [0, 2, 4])
def test_behind_a_piece_that_does_not_come_nothing_is_kept(place: int, single: pytest.MonkeyPatch) -> None:
    world = stored_only((FULL, WINDOW))
    prefetch = begun(world, TOKENS)
    assert world.advance() and len(prefetch.pieces) == 5
    page = prefetch.prefix.keys(np.array([place]))[0]
    del world.store.visible[StoreKey(tiers_of(world).names.scope(ALICE), page, 0)]
    world.drain()
    world.cache.audit()
    assert prefetch.limit <= place and world.cached(TOKENS) <= place * PAGE
    world.close()


class Stuck(ScriptedStore):
    """Reads well, into rows of which some have a byte that is always the same."""

    def __init__(self, store: ScriptedStore) -> None:
        super().__init__()
        self.visible = store.visible
        self.rows: list[np.ndarray] = []

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        answers = super().get(keys, records)
        for row in self.rows:
            row[-8] = 77
        return answers


@pytest.mark.parametrize("piece", [1, 8 << 20])
@pytest.mark.parametrize("num_bad", [1, 9])
def test_memory_that_is_at_fault_is_set_aside_and_the_store_keeps_its_records(
    num_bad: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_pieces, "PIECE_BYTES", piece)
    before = TieredCache()
    before.compute(TOKENS)
    before.drain()
    store = Stuck(before.store)
    world = TieredCache(store=store, host=256)
    store.rows = [world.copies.host[0][row] for row in range(3, 3 + num_bad)]
    found = world.fetch(TOKENS)
    assert found == len(TOKENS) if num_bad == 1 else found < len(TOKENS), "it is not tried for ever"
    assert len(store.visible) == 5
    tiers = tiers_of(world)
    assert len(tiers.hosts[0].quarantined) >= 1
    assert {tier for tier, _ in tiers.counters.defects} == {"host"}
    store.rows = []
    world.cache.audit()
    assert world.fetch(TOKENS) == len(TOKENS)
    world.close()


def test_who_sends_the_same_again_does_not_wait_for_what_was_given_up() -> None:
    world = stored_only()
    given_up = begun(world, TOKENS)
    world.ahead.stop_prefetch(given_up)
    again = begun(world, TOKENS)
    assert again is not given_up
    while world.ahead.is_awaited(again):
        assert world.advance()
    assert again.limit == 5
    world.ahead.stop_prefetch(again)
    world.close()


def waits(world: TieredCache, tokens: Ids) -> float:
    """How long a request for this prompt waits for storage, as far as that is worth it, before it begins."""
    began = world.now
    prefetch = world.ahead.prefetch(asking(tokens), ALICE)
    while prefetch is not None and world.ahead.is_awaited(prefetch):
        world.now += 0.01
        world.ahead.settle_moves()
    if prefetch is not None:
        world.ahead.stop_prefetch(prefetch)
    return world.now - began


def test_a_store_that_is_slower_than_computing_costs_little() -> None:
    """A prompt a second takes one to compute, and three to fetch."""
    world = TieredCache(always=False, prefetch=PrefetchPolicy.BREAK_EVEN, seconds=0.01)
    even = tiers_of(world).break_even
    even.computed(1000 * len(TOKENS), 1000.0)
    world.compute(TOKENS)
    forget(world)
    world.latency[Lane.FETCH] = 3.0
    waited = 0.0
    while world.now < 1000.0:
        forget(world)
        waited += waits(world, TOKENS)
        world.now += 1.0
        world.drain()
    assert even.turned_off_count > 3 and waited < 0.02 * world.now + 4 * 3.0
    world.close()


def test_prompts_that_are_new_do_not_hide_for_ever_what_is_stored() -> None:
    """To look takes a twentieth of the time to compute; after many looks in vain no request waits so long."""
    world = TieredCache(20, 40, always=False, prefetch=PrefetchPolicy.BREAK_EVEN, seconds=0.01)
    tiers_of(world).break_even.computed(1000 * len(TOKENS), 1000.0)
    world.compute(TOKENS)
    forget(world)
    world.latency[Lane.LOOK] = 0.05
    for number in range(60):
        prompt = tokens_of(range(100 + 10 * number, 105 + 10 * number)) if number < 30 else TOKENS
        waits(world, prompt)
        world.now += 10.0
        world.drain()
        if number < 59:
            forget(world)
    assert world.cached(TOKENS) == len(TOKENS)
    world.close()
