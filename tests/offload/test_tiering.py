"""What may go wrong below the device, each once and by hand: loads without room, damage, what ends too late."""

from __future__ import annotations

import pytest

from quire.cache.admission import Claim
from quire.errors import OutOfPages
from quire.observe.explain import Cause
from quire.offload import prefetch as fetched_pieces
from quire.offload.tiering import Tiering
from quire.settings.fields import WritePolicy
from quire.spec.group import ReachSpec
from quire.tiers.transfer import Lane
from tests.offload.cached_bytes import ALICE, FULL, PAGE, STATE, WINDOW, asking, tokens_of
from tests.offload.tiered_cache import TieredCache


def tiers_of(world: TieredCache) -> Tiering:
    return world.tiers


def forget(world: TieredCache) -> None:
    """It leaves the host as well."""
    world.drain()
    world.cache.evict(world.cache.pages.num_pages)
    while tiers_of(world).evict_host(world.cache.pages.num_pages):
        pass
    world.cache.audit()


def test_a_load_that_finds_no_room_on_its_link_leaves_the_request_waiting() -> None:
    """Nothing may begin on pages that are not on their way."""
    world = TieredCache(16, 32, most_bytes={Lane.LOAD: 1})
    first, second = tokens_of((1, 2, 3)), tokens_of((4, 5, 6))
    for tokens in (first, second):
        world.compute(tokens)
    world.demote()
    kv = world.cache.begin(asking(first), ALICE)
    assert kv.num_cached == len(first)
    before = world.cache.pages.num_free_pages
    with pytest.raises(OutOfPages, match="'loads' needs 3"):
        world.cache.begin(asking(second), ALICE)
    world.cache.audit()
    assert world.cache.pages.num_free_pages == before and world.cached(second) == len(second)
    world.drain()
    assert world.compute(asking(second)) == len(second)
    world.cache.finish(kv)
    world.close()


def test_damage_is_counted_once_and_keeps_no_other_request_from_caching() -> None:
    world = TieredCache()
    tokens, others = tokens_of((1, 2, 3)), tokens_of((7, 8))
    world.compute(tokens)
    world.demote()
    world.damage(tokens, 1)
    kv = world.cache.begin(asking(tokens), ALICE)
    world.drain()
    assert kv.has_failed and not kv.is_ready
    assert tiers_of(world).damaged_paths, "its request still holds the damaged page"
    world.compute(others)
    assert world.cached(others) == len(others)
    changes = world.cache.num_changes
    world.cache.finish(kv)
    assert world.ahead.settle_moves(), "room came back, which a waiting request must hear"
    assert world.cache.num_changes > changes and not tiers_of(world).damaged_paths
    assert world.cached(tokens) <= PAGE
    assert dict(tiers_of(world).counters.defects) == {("host", "digest"): 1}
    assert len(tiers_of(world).hosts[0].quarantined) == 1
    assert world.compute(tokens) <= PAGE and world.cached(tokens) == len(tokens)
    world.close()


@pytest.mark.parametrize(
    ("first", "second", "damaged"), [((1,), (1, 2, 3), (0, 2)), ((1, 2, 3, 4, 5), (1, 2, 6, 7, 8, 9), (0, 5))]
)
def test_failed_loads_with_pages_in_common_do_not_keep_each_other(
    first: tuple[int, ...], second: tuple[int, ...], damaged: tuple[int, int]
) -> None:
    """Of one path, and of two that part: all that hangs below what is damaged is forgotten, and can be had again."""
    world = TieredCache(24, 48)
    prompts = [tokens_of(first), tokens_of(second)]
    for tokens in prompts:
        world.compute(tokens)
    world.demote()
    world.damage(prompts[1], *damaged)
    both = [world.cache.begin(asking(tokens), ALICE) for tokens in prompts]
    world.drain()
    assert all(kv.has_failed for kv in both)
    for kv in both:
        world.cache.finish(kv)
    world.ahead.settle_moves()
    assert not tiers_of(world).damaged_paths and not tiers_of(world).damaged.num_damaged
    assert not any(map(world.cached, prompts))
    assert dict(tiers_of(world).counters.defects) == {("host", "digest"): 2}
    for tokens in prompts:
        world.compute(tokens)
    assert list(map(world.cached, prompts)) == list(map(len, prompts))
    world.close()


def test_a_damaged_page_that_is_computed_again_is_private_while_it_is_held() -> None:
    world = TieredCache()
    tokens = tokens_of((1, 2))
    world.compute(tokens)
    world.demote()
    world.damage(tokens, 0)
    kv = world.cache.begin(asking(tokens), ALICE)
    world.drain()
    assert world.compute(tokens) == 0
    world.cache.audit()
    assert world.cached(tokens) == 0, "no request may begin on the damaged one"
    world.cache.finish(kv)
    world.ahead.settle_moves()
    assert world.compute(tokens) == 0 and world.cached(tokens) == len(tokens)
    world.close()


def test_a_damaged_copy_of_a_page_on_the_device_is_made_again() -> None:
    world = TieredCache(stores=True)
    tokens = tokens_of((1,))
    world.compute(tokens)
    while not tiers_of(world).hosts[0].table.frame.any():
        assert world.advance()
    world.damage(tokens, 0)
    world.drain()
    assert dict(tiers_of(world).counters.defects) == {("host", "digest"): 1} and not world.stored()
    assert world.compute(asking(tokens)) == len(tokens), "the page on the device is good"
    world.drain()
    assert world.stored() == 1
    world.demote()
    assert world.compute(asking(tokens)) == len(tokens)
    world.close()


def test_a_damaged_copy_of_what_has_left_the_device_is_computed_again_and_stored() -> None:
    """Storing finds the damage; a request for the page then begins again."""
    world = TieredCache()
    tokens = tokens_of((1, 2, 3))
    world.compute(tokens)
    while not tiers_of(world).hosts[0].table.frame.any():
        assert world.advance()
    world.damage(tokens, 1)
    world.cache.parts.reclaim([12], "", ())
    world.drain()
    assert dict(tiers_of(world).counters.defects) == {("host", "digest"): 1}
    assert world.stored() == 1, "what comes before it"
    assert world.compute(asking(tokens)) <= PAGE
    world.drain()
    assert world.cached(tokens) == len(tokens) and world.stored() == 3
    world.close()


def test_what_is_evicted_is_stored_with_what_stays_on_the_device_above_it() -> None:
    world = TieredCache(write=WritePolicy.BACK)
    tokens = tokens_of((1, 2, 3))
    world.compute(tokens)
    kv = world.cache.begin(asking(tokens[: 2 * PAGE]), ALICE)
    world.demote()
    assert world.cached(tokens) == len(tokens) and int(tiers_of(world).counters.demoted_pages) == 1
    world.drain()
    assert world.stored() == 3, "a beginning that is always in use would never be stored, nor what follows it"
    world.cache.finish(kv)
    world.demote()
    assert tiers_of(world).counters.saved_frames == 3
    again = TieredCache(store=world.store)
    assert again.fetch(tokens) == len(tokens)
    again.close()
    world.close()


def test_a_request_that_reads_ahead_gives_way() -> None:
    world = TieredCache(num_pages=4)
    tokens = tokens_of((1, 2, 3, 4))
    world.compute(tokens)
    forget(world)
    world.compute(tokens[: 2 * PAGE])
    world.drain()
    prefetch = world.ahead.prefetch(asking(tokens), ALICE)
    assert prefetch is not None and world.cache.tree.num_protected == 2
    kv = world.cache.begin(tokens_of((7, 8, 9, 9)), ALICE)
    world.cache.extend([kv], 4 * PAGE)
    assert prefetch.cancelled and not world.ahead.is_awaited(prefetch)
    world.cache.audit()
    world.cache.finish(kv)
    world.close()


def test_what_another_request_computes_while_it_is_fetched_is_cached_once() -> None:
    world = TieredCache(write=WritePolicy.SELECTIVE)
    tokens = tokens_of((1, 2, 3))
    world.compute(tokens)
    world.compute(asking(tokens))  # the second use, which saves it
    forget(world)
    prefetch = world.ahead.prefetch(asking(tokens), ALICE)
    assert prefetch is not None and world.advance() and prefetch.moves
    world.compute(tokens[: 2 * PAGE])
    world.cache.audit()
    world.drain()
    world.cache.audit()
    assert world.cached(tokens) == len(tokens)
    world.demote()
    assert world.compute(asking(tokens)) == len(tokens)
    world.close()


def test_a_piece_of_which_nothing_is_read_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_pieces, "PIECE_BYTES", 1)
    world = TieredCache(reaches=(WINDOW,))
    tokens = tokens_of((1, 2, 3, 4, 5))
    world.compute(tokens)
    forget(world)
    assert world.fetch(tokens) == len(tokens)
    assert tiers_of(world).counters.fetched_frames == 2, "six tokens reach back to the last two pages"
    assert world.compute(asking(tokens)) == len(tokens)
    world.close()


def test_a_page_is_stored_after_the_one_before_it() -> None:
    world = TieredCache(write=WritePolicy.SELECTIVE)
    tokens = tokens_of((1, 2))
    world.compute(tokens)
    world.drain()
    match = world.cache.tree.match(ALICE, tokens)
    assert tiers_of(world).save(match.path[-1], match.pages, ends=(2,), first=1) is not None
    world.drain()
    assert world.stored() == 0, "no lookup would find it"
    assert tiers_of(world).save(match.path[-1], match.pages, ends=(2,)) is not None
    world.drain()
    assert world.stored() == 2
    world.close()


def test_a_prefix_is_computed_where_loading_it_leaves_no_frame_to_go_on_in() -> None:
    world = TieredCache(reaches=(FULL, STATE), frames=(12, 1))
    tokens = tokens_of((1, 2))
    world.compute(tokens)
    world.demote()
    assert tiers_of(world).hosts[1].table.frame.any()
    hit = world.cache.match(asking(tokens), ALICE)
    assert (hit.num_pages, hit.choice.declined_pages) == (0, 2)
    assert not world.cache.admission.why_not(Claim(hit, 3)), "it would wait for ever"
    world.close()


def test_a_page_that_comes_back_from_a_duplicate_passes_the_audit() -> None:
    world = TieredCache()
    tokens = tokens_of((1, 2))
    kv = world.begin(tokens)
    world.grow(kv, tokens)
    world.compute(tokens)
    world.demote()
    fence = world.cache.open_fence()
    world.cache.commit(kv, tokens)  # its frames are now those of the pages that were below only
    world.cache.audit()
    assert world.cache.match(asking(tokens), ALICE).choice.num_pages == 2
    world.cache.close_fence(fence)
    world.finish(kv)
    world.close()


def test_what_ended_while_eviction_waited_for_something_else_is_noticed() -> None:
    world = TieredCache()
    world.compute(tokens_of((1, 2)))
    world.now = 100.0
    tiers = tiers_of(world)
    tiers._ended += world.mover.finished()
    assert not world.cache.tree.num_evictable and tiers.wait(), "it holds what could be evicted"
    world.ahead.settle_moves()
    assert world.cache.tree.num_evictable == 2
    world.close()


@pytest.mark.parametrize(("reaches", "group"), [((FULL,), 0), ((FULL, WINDOW), 0), ((FULL, WINDOW), 1), ((WINDOW,), 0)])
@pytest.mark.parametrize("place", [3, 4])
def test_pages_before_a_damaged_one_stay(reaches: tuple[ReachSpec, ...], group: int, place: int) -> None:
    world = TieredCache(reaches=reaches, num_pages=24, host=60)
    tokens = tokens_of((1, 2, 3, 4, 5))
    world.compute(tokens)
    world.demote()
    pages = world.cache.tree.match(ALICE, tokens).pages
    tiers = tiers_of(world)
    frame = tiers.hosts[group].table.frame[pages[place]]
    world.copies.host[group][frame, world.copies.sizes[group] - 1] ^= 1
    kv = world.cache.begin(asking(tokens), ALICE)
    assert kv.num_cached == len(tokens) and not kv.is_ready
    while not kv.has_failed:
        assert world.advance()
    world.cache.finish(kv)
    world.drain()
    world.cache.audit()
    assert len(world.cache.tree.match(ALICE, tokens).pages) == place
    assert len(tiers.hosts[group].quarantined) == 1
    if reaches == (FULL,):
        assert world.cached(tokens) == place * PAGE and tiers.counters.loaded_frames == place
        assert world.compute(asking(tokens)) == place * PAGE, "and they are what they should be"
    else:
        world.compute(asking(tokens))
    world.close()


def test_who_needs_room_on_the_host_is_named() -> None:
    """A page that the host gave up for pages of another request says for which one, as those of the device do."""
    world = TieredCache(16, 4)
    first, second = tokens_of((1, 2, 3)), tokens_of((4, 5, 6))
    world.compute(first)
    world.demote()
    kv = world.cache.begin(second, ALICE, label="the second")
    world.cache.extend([kv], len(second))
    world.cache.finish(kv, second)
    world.drain()
    told = world.cache.admission.explain(asking(first), world.cache.match(asking(first), ALICE))
    assert {reason.by for reason in told.reasons if reason.cause is Cause.EVICTED} == {"the second"}
    world.close()


def test_each_token_that_is_reused_says_from_which_tier() -> None:
    world = TieredCache(16, 8)
    tokens = tokens_of((1, 2, 3))
    world.compute(tokens)
    world.demote()
    world.compute(tokens[:PAGE])
    told = world.cache.admission.explain(asking(tokens), world.cache.match(asking(tokens), ALICE))
    hits = [(reason.tier, reason.tokens) for reason in told.reasons if reason.cause is Cause.HIT]
    assert hits == [("device", PAGE), ("host", 2 * PAGE)]
    world.close()
