"""A look at the host decides nothing; the start of a request does, and one request at a time tries a link again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.cache.admission import Claim
from quire.observe.explain import Cause
from quire.spec.speculation import SpeculativeConfig
from quire.tiers.transfer import Lane
from tests.offload.cached_bytes import ALICE, FULL, PAGE, STATE, asking, tokens_of
from tests.offload.tiered_cache import TieredCache

PROMPTS = [tokens_of(range(first, first + 4)) for first in (0, 10, 20)]
LOOKS: list[Callable[[TieredCache], object]] = [
    lambda world: world.cache.match(asking(PROMPTS[0]), ALICE),
    lambda world: world.cache.admission.explain(asking(PROMPTS[0]), world.cache.match(asking(PROMPTS[0]), ALICE)),
    lambda world: world.cache.audit(),
]


def slow_host() -> TieredCache:
    """Prompts on the host only, which are computed in a tenth of the time to load them."""
    world = TieredCache(always=False, stores=False, seconds=0.01)
    for tokens in PROMPTS:
        world.compute(tokens)
        world.demote()
    for _ in range(9):
        world.tiers.break_even.computed(100 * PAGE, 10.0)  # 0.4 s for four pages
        world.tiers.break_even.moved(Lane.LOAD, sum(world.copies.sizes) * 4, 0.44)
    return world


@pytest.mark.parametrize("look", LOOKS)
def test_looking_turns_nothing_off_and_nothing_on(look: Callable[[TieredCache], object]) -> None:
    world = slow_host()
    even = world.tiers.break_even
    for _ in range(50):
        look(world)
    assert not even.why_off(Lane.LOAD)
    for _ in range(16):
        assert not even.decide(Lane.LOAD, 4 * PAGE, sum(world.copies.sizes) * 4)
    assert even.why_off(Lane.LOAD)
    world.now += 10.0
    for _ in range(50):
        look(world)
    assert even.why_off(Lane.LOAD) and even.is_measured(Lane.LOAD)
    assert world.compute(asking(PROMPTS[0])) == 4 * PAGE, "the trial is for who begins"
    world.close()


def test_of_several_that_matched_one_is_the_trial() -> None:
    """They wait in one queue, and each saw that the link would be tried."""
    world = slow_host()
    even, cache = world.tiers.break_even, world.cache
    while not even.why_off(Lane.LOAD):
        even.decide(Lane.LOAD, 4 * PAGE, sum(world.copies.sizes) * 4)
    world.now += 10.0
    hits = [cache.match(asking(tokens), ALICE) for tokens in PROMPTS]
    assert [hit.num_tokens for hit in hits] == [4 * PAGE] * 3
    first = cache.begin(asking(PROMPTS[0]), ALICE, hit=hits[0])
    assert not cache.admission.is_current(hits[1])
    second = cache.begin(asking(PROMPTS[1]), ALICE, hit=hits[1])
    assert (first.num_cached, second.num_cached) == (4 * PAGE, 0)
    reasons = cache.admission.explain(asking(PROMPTS[2]), cache.match(asking(PROMPTS[2]), ALICE)).reasons
    assert [reason.cause for reason in reasons][:1] == [Cause.SLOWER]
    cache.finish(first)
    cache.finish(second)
    world.close()


def test_who_begins_counts() -> None:
    world = slow_host()
    even = world.tiers.break_even
    for count in range(16):
        assert not even.why_off(Lane.LOAD), count
        kv = world.cache.begin(asking(PROMPTS[count % 3]), ALICE)
        assert kv.num_cached == 0
        world.cache.finish(kv)
    assert even.why_off(Lane.LOAD)
    world.close()


@pytest.mark.parametrize(("frames", "reused"), [(5, 0), (6, 4 * PAGE)])
def test_a_load_that_leaves_no_room_for_drafts_is_declined(frames: int, reused: int) -> None:
    """A request needs a state and one after each of four drafts. It would wait for ever for one more."""
    speculation = SpeculativeConfig(method="ngram", num_steps=4, num_draft_tokens=5)
    world = TieredCache(reaches=(FULL, STATE), frames=(16, frames), stores=False, speculation=speculation)
    world.compute(PROMPTS[0])
    world.demote()
    hit = world.cache.match(asking(PROMPTS[0]), ALICE)
    assert hit.num_tokens == reused and bool(hit.choice.declined_pages) != bool(reused)
    assert world.cache.admission.why_not(Claim(hit, 5)) == ""
    assert world.compute(asking(PROMPTS[0])) == reused
    world.close()
