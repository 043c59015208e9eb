"""Groups that share bytes: random replays in which frames move, with every read checked."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from quire.cache import KVCache
from quire.cache.admission import Claim
from quire.errors import OutOfPages
from quire.spec.ids import Ids
from quire.testing import ContentOracle
from quire.testing.choices import Choices
from tests.sim.arenas import arena_plan, run_arena_replay, shake

KINDS = ({}, {"shakes": True}, {"tiers": True}, {"shakes": True, "tiers": True}, {"drafts": True, "shakes": True})


def check_replays(seeds: range, **kind: bool) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += run_arena_replay(seed, **kind)
    assert happened["ended"] == 30 * len(seeds), "a request did not come to its end"
    assert min(happened[name] for name in ("moved", "hits", "evicted", "dropped")) > 10 * len(seeds)


@pytest.mark.parametrize("kind", KINDS, ids=["-".join(kind) or "plain" for kind in KINDS])
def test_frames_move_and_every_read_is_right(kind: dict[str, bool]) -> None:
    check_replays(range(4), **kind)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS, ids=["-".join(kind) or "plain" for kind in KINDS])
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
