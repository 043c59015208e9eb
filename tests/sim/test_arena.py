"""Groups that share bytes: random replays in which frames move, with every read checked."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from quire.cache import KVCache
from quire.cache.admission import Claim
from quire.errors import OutOfPages
from quire.observe.explain import Cause
from quire.sim.arrivals import Arrivals
from quire.sim.device import SimulatedDevice
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.settings import SimulatedTiers
from quire.spec.ids import Ids
from quire.testing import ContentOracle
from quire.testing.choices import Choices
from tests.changes import CORE, SIMULATOR, TIERS, in_turns
from tests.sim.arenas import arena_plan, arena_trace, run_arena_replay, shake
from tests.sim.replays import COST

KINDS = ({}, {"shakes": True}, {"tiers": True}, {"shakes": True, "tiers": True}, {"drafts": True, "shakes": True})

NAMES = ["-".join(kind) or "plain" for kind in KINDS]
WATCHED = (*SIMULATOR, *CORE, *TIERS, "tests/sim/")


def check_replays(seeds: range, **kind: bool) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += run_arena_replay(seed, **kind)
    assert happened["ended"] == 30 * len(seeds), "a request did not come to its end"
    assert min(happened[name] for name in ("moved", "hits", "evicted", "dropped")) > 10 * len(seeds)


@pytest.mark.parametrize("kind", in_turns(KINDS, 2, *WATCHED), ids=NAMES)
def test_frames_move_and_every_read_is_right(kind: dict[str, bool]) -> None:
    check_replays(range(4), **kind)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_frames_move_and_every_read_is_right_for_long(kind: dict[str, bool]) -> None:
    check_replays(range(100, 300), **kind)


def tokens(choices: Choices, count: int) -> Ids:
    return np.array([choices.between(1, 9) for _ in range(count)], dtype=np.int32)


def check_page_tables(seed: int) -> int:
    """What is reported to a device is what its page tables lack, also of pages whose frames have moved."""
    choices = Choices.seeded(seed)
    cache = KVCache(plan := arena_plan(choices), page_tables=True)
    cache.parts.moved.append(ContentOracle(cache).move)
    on_device = np.zeros((len(cache.rows.columns), plan.max_requests * plan.pages_per_row), dtype=np.int32)
    groups = [group.index for group in cache.groups if not group.reach.in_place]
    kvs, moved = [], 0
    for _ in range(plan.max_requests):
        prompt = tokens(choices, choices.between(1, max(1, plan.context // plan.max_requests)))
        try:
            kv = cache.begin(prompt)
            cache.extend([kv], [len(prompt) - kv.num_cached])
        except OutOfPages:
            continue
        kvs.append(kv)
        moved += shake(cache, choices)
        changes = cache.rows.page_table_changes()
        on_device[:, changes.places] = changes.frames
        for at, group in enumerate(groups):
            for each in kvs:
                found = cache.rows.page_table([each], [cache.rows.allocated(each)], group)[0]
                first = each.row * plan.pages_per_row
                assert (on_device[at, first : first + len(found)] == found).all(), "a device reads an old frame"
    cache.audit()
    return moved


def check_tables() -> None:
    assert sum(check_page_tables(seed) for seed in range(40)) > 100


def test_a_device_is_told_of_pages_that_have_moved() -> None:
    check_tables()


def test_without_a_device_that_copies_nothing_moves() -> None:
    cache = KVCache(arena_plan(Choices.seeded(3)))
    (room,) = cache.parts.rooms
    assert room.is_shared and all(cache._fixed(group) is None for group in (0, 1))


def compute(cache: KVCache, prompt: Ids) -> None:
    """One request, alone, step by step."""
    kv = cache.begin(prompt)
    settled = kv.num_cached
    while settled < len(prompt):
        end = min(len(prompt), settled + cache.admission.at_once(kv, 4 * cache.page_size))
        cache.extend([kv], [end - settled])
        for group in (0, 1):
            cache.launch(group, [kv], np.array([end]))
        cache.commit(kv, prompt[:end])
        settled = end
    cache.finish(kv, prompt)


def test_the_largest_request_has_the_whole_arena() -> None:
    """Whatever the other group held before, one request of the plan's context fits when it is alone."""
    for seed in range(60):
        choices = Choices.seeded(seed)
        cache = KVCache(plan := arena_plan(choices), checkpoint_interval=plan.page_size)
        cache.parts.moved.append(ContentOracle(cache).move)
        for _ in range(8):
            compute(cache, tokens(choices, choices.between(1, max(1, plan.context // 4))))
        prompt = tokens(choices, plan.context)
        assert not cache.admission.why_not(Claim(cache.match(prompt), plan.pages_of(plan.context)))
        compute(cache, prompt)
        cache.audit()


def test_a_request_that_is_alone_is_looked_at_again_after_a_failed_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else that happens would have it looked at."""
    move, rng, failed = SimulatedDevice.move_frames, random.Random(0), 0

    def now_and_then(device: SimulatedDevice, group: int, sources: Ids, targets: Ids) -> None:
        nonlocal failed
        if rng.random() < 1 / 2:
            failed += 1
            raise OutOfPages(group="full", wanted=len(sources), free=0, held_by="no memory to copy with")
        move(device, group, sources, targets)

    monkeypatch.setattr(SimulatedDevice, "move_frames", now_and_then)
    for seed in range(6):
        choices = Choices.seeded(seed)
        plan = arena_plan(choices)
        replay = Replay(plan, COST, ReplaySettings(check="all", chunk=32), events=[lambda: math.inf])
        arrivals, turns = Arrivals(arena_trace(choices, plan, 30)), 0
        replay.begin(arrivals)
        while replay.loop.is_busy or arrivals.next_time is not None:
            replay.turn()
            turns += 1
            assert turns < 2000, replay.scheduler.waiting[0].wait_reason
        assert replay.result().count("length") == 30
    assert failed > 100


def test_what_leaves_a_request_no_room_is_computed_again_and_explained() -> None:
    """A state that is loaded takes the bytes of pages that the largest requests need."""
    causes: Counter[str] = Counter()
    for seed in (3, 11, 16):
        choices = Choices.seeded(seed)
        plan = arena_plan(choices)
        assert plan.arena is not None
        num_pages = plan.arena.most(0, 1)
        plan = replace(plan, num_pages=num_pages, context=num_pages * plan.page_size)
        tiers = SimulatedTiers(host_tokens=400 * plan.page_size)
        replay = Replay(plan, COST, ReplaySettings(check="all", chunk=32, explain=True, tiers=tiers))
        result = replay.run(arena_trace(choices, plan, 60))
        assert result.count("length") == 60
        for record in result.records:
            assert record.explanation is not None
            causes.update(record.explanation.tokens_by_cause())
    assert causes[Cause.ROOM] > 100 and not causes[Cause.LOGPROBS]
