"""Caches with tiers under random operations and faults, and that such a run shows something."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from quire.cache.request_kv import RequestKV
from quire.spec.group import ReachSpec
from quire.spec.hisparse import HotBuffers
from quire.testing.choices import Choices
from quire.testing.plans import small_plan
from tests.changes import TIERS, slow_unless_changed
from tests.fuzz.device import Part, Step, ids
from tests.fuzz.parallel import Task, fuzz
from tests.fuzz.run import Tally, run_life, run_lives
from tests.fuzz.shorten import shorten
from tests.fuzz.tier_faults import DAMAGING, FAULTS
from tests.fuzz.tier_world import TierAsk, TierWorld
from tests.fuzz.tiered_cache import TieredCache
from tests.fuzz.tiered_machine import come_to_rest, let_all_arrive, make_cache
from tests.mutants import MUTANTS, injected

MUST_HAPPEN = (
    "hit",
    "host hit",
    "loads",
    "fetched",
    "prefetch",
    "demote",
    "forget",
    "drop",
    "flush in flight",
    "recovers",
    "out of pages",
    "duplicate",
    "split",
    "idle",
    "accepted",
    "rejected",
)


def lives(seed: int, number: int, ask: TierAsk = TierAsk()) -> Tally:  # noqa: B008 - it cannot change
    found = run_lives("tiers", count(seed).__next__, lives=number, ask=ask)
    assert found.violation is None, found.violation
    return found


@pytest.mark.slow
def test_nothing_is_found_without_faults() -> None:
    found = lives(21_000, 100)  # in one of a hundred the store alone has what a known prefix lacks
    assert found.lives == 100 and not found.met
    rare = [name for name in MUST_HAPPEN if not found.happened[name]]
    assert not rare, "never happened, so this run shows little"


@slow_unless_changed(*TIERS, "tests/fuzz/")
def test_whatever_is_damaged_is_named_and_never_read() -> None:
    found = lives(30_000, 40, TierAsk(None, FAULTS))
    names = {fault: {name for other, name in found.met if other == fault} for fault in DAMAGING}
    assert sum(found.met.values()) > 10
    assert names["bit-flip"] and names["drop-field"] and names["stale-slot"] and names["truncate-record"]
    assert found.happened["fail-store"] and found.happened["full-disk"] and found.happened["slow-store"]
    assert {fault for fault, _ in found.met} <= set(DAMAGING)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_seeds_with_faults() -> None:
    found = fuzz(Task("tiers", 100_000, 2, lives=2_000, ask=TierAsk(None, FAULTS, spared=20)), lambda tally: None)
    assert found.violation is None, found.violation
    assert found.lives == 2_000
    assert {fault for fault, _ in found.met} == set(DAMAGING)
    print(found.operations, sorted(found.met.items()))


def test_a_life_without_storage_has_none() -> None:
    found = lives(5, 6, TierAsk(storage=False))
    assert not found.happened["prefetch"] and found.happened["loads"]


def test_what_a_commit_forgot_for_its_first_request_its_second_one_caches_anew() -> None:
    plan = small_plan(6, 1, max_requests=4)
    drawn = Choices(lambda n: int(n == 12))
    world = TierWorld(plan, TierAsk(storage=False), drawn)
    assert world.settings.host_frames == (2,)
    cache = TieredCache(make_cache(world, plan, None, drawn, checkpoint_interval=1), world, None)

    def compute(*kvs: RequestKV) -> Step:
        batch = [cache.followed(kv) for kv in kvs]
        cache.extend(kvs, [s.num_tokens for s in batch])
        for s in batch:
            s.launched = s.settled = s.num_tokens
        step = cache.device.launch([*kvs], [Part(0, s.num_tokens, s.name) for s in batch])
        cache.launched(step)
        cache.execute(step, batch)
        return step

    both = [cache.begin(ids([2, 3])), cache.begin(ids([7]))]
    for tokens in (ids([2]), ids([7])):
        other = cache.begin(tokens)
        cache.close_fence(compute(other))
        cache.commit(other, tokens)
    cache.finish(other)
    let_all_arrive(cache)
    cache.demote(1)
    assert cache.statistics().cached_pages == 1, "only the host has 7, in the frame that 3 will need"

    step = compute(*both)
    cache.commit(both, [ids([2, 3]), ids([7])])
    assert cache.happened["forgotten meanwhile"] == 1
    assert (cache.statistics().cached_pages, cache.statistics().duplicate_pages) == (3, 1)
    assert cache.pages.num_free_pages == 8 - 3 - 1, "the duplicate waits for the step"
    cache.close_fence(step)
    assert cache.pages.num_free_pages == 8 - 3
    for s in [*cache.model.live]:
        cache.finish(s.kv)
    come_to_rest(cache)


def test_a_page_whose_record_is_still_read_leaves_every_group() -> None:
    """Its id stays out of use until the store has read the record in place. Its window must not stay with it."""
    full, window = ReachSpec(), ReachSpec("window", 2)
    plan = small_plan(4, 1, groups=("index", "latents", "window"), reaches=(full, full, window))
    plan = replace(plan, hot=HotBuffers(group=1, buffer_size=1, top_k=1))
    drawn = Choices(lambda n: n - 1)
    world = TierWorld(plan, TierAsk(storage=True), drawn)
    cache = TieredCache(make_cache(world, plan, None, drawn, checkpoint_interval=1), world, None)
    tokens = ids([2, 3])
    kv = cache.begin(tokens)
    s = cache.followed(kv)
    cache.extend([kv], len(tokens))
    s.launched = s.settled = len(tokens)
    step = cache.device.launch([kv], [Part(0, len(tokens), s.name)])
    cache.launched(step)
    cache.execute(step, [s])
    cache.close_fence(step)
    cache.finish(kv, tokens)
    while cache.tiers.moving:
        world.clock.now = world.mover.next_end or world.clock.now
        cache.settle_moves()
    cache.forget()
    assert len(cache.tiers.hosts[1].still_read) == len(tokens), "an archive still reads both"
    assert [group.num_free for group in cache.cache.groups] == [group.num_frames for group in cache.cache.groups]
    come_to_rest(cache)
    assert cache.cache.pages.num_free_pages == cache.cache.pages.num_pages


def test_a_seed_is_a_life_with_tiers_too() -> None:
    ask = TierAsk(None, FAULTS)
    first, again, other = (run_life("tiers", seed, 100, ask=ask) for seed in (1, 1, 2))
    assert first.digest == again.digest != other.digest
    assert (first.happened, first.met) == (again.happened, again.met)


@slow_unless_changed(*TIERS, "tests/fuzz/")
def test_a_violation_at_the_end_of_a_life_is_met_again_and_made_short() -> None:
    with injected("a-flush-leaves-the-store"):
        found = run_lives("tiers", count().__next__, lives=60).violation
        assert found is not None and "stored of what was cleared" in found.message
        again = run_life("tiers", found.seed, found.operation, ask=found.ask).violation
        assert again == found
        short = shorten(found, seconds=5)
    assert short and "stored of what was cleared" in short[-1]


def test_there_are_twenty_mistakes_of_tiers() -> None:
    assert len([made for made in MUTANTS.values() if made.level == "tiers"]) >= 20
