"""After a flush hits are 0, in all tiers, whatever is held, on its way or being computed. So after new weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from quire.counters import statistics_of
from quire.errors import StoreError
from quire.prefix.match import find_divergence
from quire.settings.fields import WritePolicy
from quire.spec.events import AllCleared, Namespace, PagesRemoved, PagesStored
from quire.tiers.store import Answer, Entry, StoreKey
from quire.tiers.tombstones import tombstone_of
from quire.tiers.transfer import Lane
from tests.clear import clear
from tests.offload.cached_bytes import ALICE, BOB, FULL, PAGE, STATE, WINDOW, asking, tokens_of
from tests.offload.tiered_cache import TieredCache
from tests.tiers.scripted_store import ScriptedStore

MODELS = [(FULL,), (FULL, WINDOW), (FULL, STATE), (WINDOW,)]
SECRET = tokens_of([1, 2, 3, 4])


def filled(**options: object) -> TieredCache:
    """Two namespaces with the same tokens, in all tiers; most of alice's is below the device only."""
    tiered = TieredCache(**options)  # type: ignore[arg-type]
    for space in (ALICE, BOB):
        tiered.compute(SECRET, space)
        tiered.drain()
    tiered.compute(tokens_of(range(50, 58)), BOB)
    tiered.drain()
    assert tiered.cached(SECRET, ALICE) > 0 < tiered.cached(SECRET, BOB)
    assert tiered.stored(ALICE) > 0 < tiered.stored(BOB)
    return tiered


@pytest.mark.parametrize("reaches", MODELS)
def test_a_namespace_is_gone_from_all_tiers(reaches: tuple[object, ...]) -> None:
    tiered = filled(reaches=reaches, host=24)
    bobs = tiered.stored(BOB)
    done = tiered.flush(ALICE)
    assert done.flushed_tokens == len(SECRET) and done.held_tokens == 0
    assert tiered.cached(SECRET, ALICE) == 0
    assert tiered.fetch(SECRET, ALICE) == 0, "while the store still has it"
    tiered.drain()
    assert tiered.fetch(SECRET, ALICE) == tiered.stored(ALICE) == 0
    assert tiered.stored(BOB) == bobs and tiered.cached(SECRET, BOB) > 0
    tiered.cache.audit()
    assert tiered.compute(SECRET, ALICE) == 0
    tiered.drain()
    assert tiered.compute(asking(SECRET), ALICE) == len(SECRET), "it is cached again"
    assert tiered.stored(ALICE) > 0
    tiered.close()


@pytest.mark.parametrize("reaches", MODELS)
def test_everything_is_gone_from_all_tiers(reaches: tuple[object, ...]) -> None:
    tiered = filled(reaches=reaches, host=24)
    foreign = StoreKey(b"of another model", bytes(32), 0)
    tiered.store.visible[foreign] = b"theirs"
    tiered.flush(None)
    tiered.drain()
    for space in (ALICE, BOB):
        assert tiered.fetch(SECRET, space) == tiered.stored(space) == 0
    assert set(tiered.store.visible) == {foreign}
    tiered.close()


def test_to_clear_the_cache_clears_host_and_store_but_not_what_is_held() -> None:
    tiered = filled()
    kv = tiered.begin(asking(SECRET), ALICE)
    clear(tiered.cache)
    tiered.drain()
    tiered.cache.audit()
    assert not tiered.store.visible and tiered.cached(SECRET, BOB) == 0
    assert tiered.cached(SECRET, ALICE) == len(SECRET)
    tiered.finish(kv)
    tiered.close()


def test_what_a_save_holds_when_the_cache_is_cleared_is_stored_when_it_is_used_again() -> None:
    tiered = TieredCache()
    tiered.compute(SECRET, ALICE)
    tiered.drain()
    longer = tokens_of([1, 2, 3, 4, 5])
    tiered.compute(longer, ALICE)
    tiered.ahead.settle_moves()
    assert tiered.tiers.moving and not len(tiered.tiers.archiver.pending) and tiered.stored(ALICE) == 4
    clear(tiered.cache)
    tiered.drain()
    tiered.now += 1_000
    tiered.drain()
    assert tiered.stored(ALICE) == 0
    assert tiered.compute(asking(SECRET), ALICE) == len(SECRET), "the save held it"
    tiered.drain()
    assert tiered.stored(ALICE) >= 4
    tiered.close()


@pytest.mark.parametrize("link", [Lane.SAVE, Lane.ARCHIVE, Lane.LOOK, Lane.FETCH])
def test_to_clear_the_cache_clears_what_is_on_its_way(link: Lane) -> None:
    tiered = TieredCache()
    tiered.compute(SECRET, ALICE)
    if link in (Lane.LOOK, Lane.FETCH):
        tiered.drain()
        pages = tiered.cache.tree.evict(12)
        tiered.cache.parts.free(pages)
        assert tiered.cached(SECRET) == 0 < tiered.stored()
        assert tiered.ahead.prefetch(asking(SECRET), ALICE) is not None
    while not tiered.mover._queues[link.queue]:
        assert tiered.advance()
    tiered.now += 0.9
    clear(tiered.cache)
    tiered.drain()
    tiered.cache.audit()
    assert not tiered.store.visible and tiered.cache.tree.num_below == 0
    tiered.close()


@pytest.mark.parametrize("reaches", MODELS)
@pytest.mark.parametrize("kind", ["flush", "flush all", "epoch"])
def test_what_a_request_holds_is_found_by_no_other(reaches: tuple[object, ...], kind: str) -> None:
    tiered = filled(reaches=reaches, host=24)
    kv = tiered.begin(asking(SECRET), ALICE)
    assert kv.num_cached == len(SECRET)
    done = forget(tiered, kind)
    assert done.held_tokens == len(SECRET)
    tiered.cache.audit()
    assert tiered.cached(SECRET, ALICE) == 0
    longer = tokens_of([1, 2, 3, 4, 5, 6, 7])
    longer[len(SECRET)] = -1
    tiered.grow(kv, longer)
    tiered.cache.commit(kv, longer)
    tiered.cache.audit()
    assert tiered.cached(longer, ALICE) == 0, "nor is what it computes"
    assert not tiered.cache.admission.will_leave(kv, 6), "no request need wait for it"
    again = tiered.begin(asking(SECRET), ALICE)
    tiered.grow(again, asking(SECRET))
    tiered.finish(again, asking(SECRET))
    assert tiered.cached(SECRET, ALICE) == len(SECRET)
    tiered.finish(kv, longer)
    tiered.drain()
    tiered.cache.audit()
    assert not tiered.cache.tree.hidden_roots, "what it held is free"
    assert tiered.cached(longer, ALICE) == tiered.fetch(longer, ALICE) == len(SECRET), "which is of the other"
    tiered.close()


def forget(tiered: TieredCache, kind: str):  # type: ignore[no-untyped-def]
    if kind == "epoch":
        return tiered.set_epoch(1)
    return tiered.flush(ALICE if kind == "flush" else None)


@pytest.mark.parametrize("kind", ["flush", "flush all", "epoch"])
def test_a_request_that_had_begun_on_nothing_does_not_leave_it_either(kind: str) -> None:
    tiered = TieredCache()
    kv = tiered.begin(SECRET, ALICE)
    forget(tiered, kind)
    tiered.grow(kv, SECRET)
    tiered.finish(kv, SECRET)
    tiered.drain()
    assert tiered.cached(SECRET, ALICE) == tiered.fetch(SECRET, ALICE) == 0
    assert not tiered.store.visible
    tiered.close()


@pytest.mark.parametrize("reaches", MODELS[:3])
@pytest.mark.parametrize("kind", ["flush", "flush all", "epoch"])
@pytest.mark.parametrize("link", [Lane.SAVE, Lane.ARCHIVE, Lane.LOOK, Lane.FETCH, Lane.LOAD])
def test_what_is_on_its_way_does_not_bring_it_back(reaches: tuple[object, ...], kind: str, link: Lane) -> None:
    tiered = TieredCache(reaches=reaches, host=24)
    tiered.compute(SECRET, ALICE)
    kv = None
    if link in (Lane.LOOK, Lane.FETCH):
        tiered.drain()
        stored = dict(tiered.store.visible)
        tiered.flush(ALICE)
        tiered.drain()
        tiered.store.visible |= stored  # as another process may have put it there
        tiered.flushes.clear()
        assert tiered.ahead.prefetch(asking(SECRET), ALICE) is not None
    elif link is Lane.LOAD:
        tiered.drain()
        tiered.compute(tokens_of(range(50, 60)), BOB)
        tiered.drain()
        kv = tiered.cache.begin(asking(SECRET), ALICE)
    while not tiered.mover._queues[link.queue]:
        assert tiered.advance(), f"there never was a {link}"
    tiered.cache.audit()
    forget(tiered, kind)
    tiered.cache.audit()
    while tiered.advance():
        tiered.cache.audit()
        assert tiered.cached(SECRET, ALICE) == 0
    if kv is not None:
        tiered.cache.finish(kv)
    assert tiered.fetch(SECRET, ALICE) == 0
    assert tiered.cache.pages.num_free_pages >= tiered.cache.pages.num_pages - 10, "nothing of it leaks"
    if kind != "epoch":
        assert tiered.stored(ALICE) == 0
    tiered.close()


def test_new_weights_have_keys_of_their_own_and_old_ones_stay_stored() -> None:
    tiered = filled()
    before = dict(tiered.store.visible)
    done = tiered.set_epoch(1)
    assert done.flushed_tokens > 0
    tiered.drain()
    tiered.cache.audit()
    assert tiered.cache.pages.num_free_pages == tiered.cache.pages.num_pages
    assert dict(tiered.store.visible) == before, "other engines may be at them still"
    for space in (ALICE, BOB):
        assert tiered.fetch(SECRET, space) == tiered.compute(SECRET, space) == 0
        tiered.drain()
    fresh = set(tiered.store.visible) - set(before)
    assert len(fresh) == 8
    assert not {key.page for key in fresh} & {key.page for key in before}
    assert not {key.scope for key in fresh} & {key.scope for key in before}
    tiered.set_epoch(0)
    assert tiered.fetch(SECRET, ALICE) == len(SECRET), "the old ones are of the old epoch, and right there"
    assert tiered.compute(asking(SECRET), ALICE) == len(SECRET)
    tiered.close()


class Moody(ScriptedStore):
    """A store that cannot be listed, or does not remove, while it is `down` so."""

    down = ""

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        if self.down == "entries":
            raise StoreError("no answer")
        return super().entries(scope)

    def remove(self, keys: object) -> int:
        return 0 if self.down == "remove" else super().remove(keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("down", ["entries", "remove"])
def test_what_the_store_cannot_forget_now_is_not_looked_for_and_forgotten_later(down: str) -> None:
    store = Moody()
    tiered = filled(store=store)
    store.down = down
    tiered.flush(ALICE)
    for _ in range(4):
        tiered.drain()
        assert tiered.stored(ALICE) > 0 == tiered.fetch(SECRET, ALICE)
        tiered.now += 2
        tiered.ahead.settle_moves()
    assert tiered.tiers.deletion.num_failed >= 3
    assert tiered.fetch(tokens_of([1, 2, 3]), BOB) > 0, "others are served"
    tiered.compute(SECRET, ALICE)
    store.down = ""
    tiered.now += 2
    tiered.drain()
    tiered.now += 2
    tiered.ahead.settle_moves()
    tiered.drain()
    assert tiered.tiers.deletion.scopes == {}
    tiered.flush(ALICE)
    tiered.drain()
    assert tiered.stored(ALICE) == 0
    tiered.close()


@pytest.mark.parametrize("space", [ALICE, None])
def test_what_was_flushed_does_not_come_back_with_another_engine(space: Namespace | None) -> None:
    """The first one ends before the store has forgotten it. The next one finds the mark, and has it forgotten."""
    store = Moody()
    first = filled(store=store)
    store.down = "remove"
    first.flush(space)
    first.drain()
    assert first.state(space) == ("hidden", False)
    stored = first.stored(ALICE)
    assert stored > 0 == first.fetch(SECRET, ALICE)
    second = TieredCache(store=store)
    for _ in range(2):
        assert second.fetch(SECRET, ALICE) == 0 and second.stored(ALICE) == stored
        second.drain()
        second.now += 2
    assert second.tiers is not None and len(second.tiers.deletion.scopes) == 1
    assert (second.fetch(tokens_of([1, 2, 3]), BOB) > 0) == (space is ALICE)
    store.down = ""
    second.now += 2
    second.ahead.settle_moves()
    second.drain()
    assert second.stored(ALICE) == 0 == second.fetch(SECRET, ALICE)
    assert second.tiers.deletion.scopes == {}
    assert second.compute(SECRET, ALICE) == 0
    second.drain()
    third = TieredCache(store=store)
    assert third.fetch(SECRET, ALICE) == len(SECRET), "which was stored since"
    for each in (first, second, third):
        each.close()


def test_pages_that_another_engine_flushed_are_stored_again_only_when_they_are_used() -> None:
    store = Moody()
    first, second = TieredCache(store=store), filled(store=store)
    assert (used := second.stored(ALICE)) > 0 < statistics_of(second.tiers.sections())["tiers"]["host_pages"]
    store.down = "remove"
    first.flush(ALICE)
    first.drain()
    store.down = ""
    assert second.fetch(tokens_of([7, 8]), ALICE) == 0, "this lookup finds the tombstone"
    for _ in range(3):
        second.drain()
        second.now += 1_000
    assert second.stored(ALICE) == 0 and second.tiers.deletion.scopes == {}
    assert second.cached(SECRET, ALICE) == len(SECRET), "only the engine that is flushed deletes its own"
    second.tiers.evict_host(1)
    second.drain()
    assert second.stored(ALICE) == 0, "a deleted page that is not used again stays deleted"
    assert second.compute(asking(SECRET), ALICE) > 0
    second.drain()
    assert second.stored(ALICE) >= used
    for each in (first, second):
        each.close()


def test_a_lookup_that_a_flush_overtakes_does_not_delete_what_is_stored_after_it() -> None:
    """The lookup finds the tombstone of its own engine, and its answer arrives after the deletion has ended."""

    class Late(ScriptedStore):
        answers: dict[StoreKey, Answer] = {}  # noqa: RUF012

        def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
            return [self.answers.get(key, answer) for key, answer in zip(keys, super().exists(keys), strict=True)]

    store = Late()
    tiered = filled(store=store)
    unused = tokens_of([1, 2, 9, 9])
    tiered.latency[Lane.LOOK] = 10.0
    assert tiered.ahead.prefetch(unused, ALICE) is not None
    tiered.flush(ALICE)
    scope = tiered.tiers.names.scope(ALICE)
    store.answers = {tombstone_of(scope): Answer.HIT}
    tiered.advance()
    tiered.compute(SECRET, ALICE)
    while tiered.stored(ALICE) < 4:
        assert tiered.advance()
    assert tiered.tiers.deletion.scopes == {} and tiered.mover._queues[Lane.LOOK.queue]
    tiered.drain()
    assert tiered.stored(ALICE) == 4
    tiered.close()


def test_a_flush_says_what_has_become_of_what_was_stored() -> None:
    store = Moody()
    tiered = filled(store=store)
    tiered.flush(ALICE)
    assert tiered.state(ALICE) == ("held", True)
    with pytest.raises(StoreError, match="does not answer"):
        tiered.flushed(ALICE, waits=False)
    assert tiered.flushed(ALICE, waits=True) is None
    tiered.drain()
    assert tiered.flushed(ALICE, waits=True).storage == "gone"
    store.down = "remove"
    tiered.flush(BOB)
    tiered.drain()
    assert tiered.flushed(BOB, waits=True).storage == "hidden", "no caller need wait for the next try"
    store.refused["prepare"].add(tombstone_of(tiered.tiers.names.scope_prefix))
    tiered.flush(None)
    tiered.drain()
    assert tiered.flushed(None, waits=True) is None, "the store may take it yet"
    with pytest.raises(StoreError, match="after a restart"):
        tiered.flushed(None, waits=False)
    tiered.close()
    assert TieredCache(stores=False).flushed(None, waits=True).storage == "none"


def test_an_engine_that_ends_does_not_begin_to_forget() -> None:
    store = Moody()
    tiered = filled(store=store)
    store.down = "remove"
    tiered.flush(ALICE)
    tiered.drain()
    store.down = ""
    tiered.tiers.deletion.end()
    tiered.now += 5
    tiered.drain()
    assert tiered.stored(ALICE) > 0 and not tiered.tiers.deletion.is_due
    assert tiered.state(ALICE) == ("hidden", False)
    tiered.close()


def test_what_would_be_forgotten_with_the_rest_is_stored_later() -> None:
    store = Moody()
    tiered = filled(store=store, seconds=0.0)
    store.down = "entries"
    tiered.flush(ALICE)
    tiered.drain()
    tiered.compute(SECRET, ALICE)
    tiered.drain()
    store.down = ""
    tiered.now += 2
    tiered.drain()
    assert tiered.stored(ALICE) == 4, "no caller had to ask again"
    tiered.close()


@pytest.mark.parametrize("write", list(WritePolicy))
def test_events_say_that_it_is_gone(write: WritePolicy) -> None:
    tiered = TieredCache(emit=True, seconds=0.0, write=write)
    tiered.compute(SECRET, ALICE)
    tiered.compute(SECRET, BOB)
    kv = tiered.begin(asking(SECRET[: 2 * PAGE]), ALICE)
    tiered.flush(ALICE)
    tiered.finish(kv)
    tiered.drain()
    there: dict[object, int] = {}
    for event in tiered.events:
        if isinstance(event, PagesStored | PagesRemoved):
            change = 1 if isinstance(event, PagesStored) else -1
            for digest in event.hashes:
                key = event.namespace, event.tier, digest
                there[key] = there.get(key, 0) + change
                assert there[key] in (0, 1), "it was there already, or was not there"
    assert {key[0] for key, count in there.items() if count} == {BOB}  # type: ignore[index]
    tiered.flush(None)
    assert isinstance(tiered.events[-1], AllCleared)
    tiered.close()


def test_events_of_new_weights_name_pages_otherwise() -> None:
    tiered = TieredCache(emit=True, seconds=0.0)
    named = []
    for epoch in (0, 1, 0):
        if epoch != tiered.epoch:
            tiered.set_epoch(epoch)
        tiered.events.clear()
        tiered.compute(SECRET)
        stored = [event for event in tiered.events if isinstance(event, PagesStored)]
        named.append({digest for event in stored for digest in event.hashes})
        tiered.drain()
    assert named[0] == named[2] and not named[0] & named[1]
    tiered.close()


def test_nothing_is_explained_by_what_was_flushed() -> None:
    tiered = filled()
    kv = tiered.begin(asking(SECRET), ALICE)
    tiered.flush(ALICE)
    prompt = np.append(SECRET[:PAGE], 9).astype(np.int32)
    tree = tiered.cache.tree
    divergence = find_divergence(tree.roots, tree.match(BOB, prompt), prompt, tree.page_size)
    assert divergence.elsewhere is None
    tiered.finish(kv)
    tiered.close()
