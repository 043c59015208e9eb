"""An arena evicts what no request can begin after, spares a part for what is cached, and lies around damaged frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from quire.cache import KVCache
from quire.cache.admission import Claim
from quire.cache.groups import resume_point
from quire.cache.kv_cache import NAMESPACE
from quire.errors import OutOfPages
from quire.prefix.node import pages_to
from quire.settings.tenants import tenants_of
from quire.spec.arena import SPARED
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.testing import ContentOracle
from quire.testing.choices import Choices
from tests.sim.arenas import arena_plan


def tokens(choices: Choices, count: int) -> Ids:
    return np.array([choices.between(1, 3) for _ in range(count)], dtype=np.int32)


def arena(seed: int, names: Sequence[str] = ()) -> tuple[Choices, KVCache]:
    choices = Choices.seeded(seed)
    plan = arena_plan(choices)
    tenants = tenants_of({name: {"floor": "10%"} for name in names}) if names else ()
    cache = KVCache(plan, checkpoint_interval=plan.page_size, tenants=tenants)
    cache.parts.moved.append(ContentOracle(cache).move)
    return choices, cache


def compute(cache: KVCache, prompt: Ids, namespace: Namespace = NAMESPACE) -> None:
    """One request, alone, step by step."""
    kv = cache.begin(prompt, namespace)
    settled = kv.num_cached
    while settled < len(prompt):
        end = min(len(prompt), settled + cache.admission.at_once(kv, 4 * cache.page_size))
        cache.extend([kv], [end - settled])
        for group in (0, 1):
            cache.launch(group, [kv], np.array([end]))
        cache.commit(kv, prompt[:end])
        settled = end
    cache.finish(kv, prompt)


def check_order(seed: int, names: Sequence[str] = ()) -> tuple[int, int]:
    """While the last page of a leaf has lost a frame, only leaves of its tenant are evicted that no request can begin
    after, and what is left of one is what one can begin after. Returns how often there was such a leaf, and another one
    beside it."""
    choices, cache = arena(seed, names)
    found = beside = 0
    partial = [group for group in cache.groups if not group.reach.whole]
    for _ in range(6):
        space = Namespace(salt=f"{choices.one_of(names)}/") if names else NAMESPACE
        compute(cache, tokens(choices, choices.between(1, max(1, cache.plan.context // 2))), space)
        for group in partial:
            group.evict(choices.below(3))
        while choices.chance(70) and cache.tree.num_evictable:
            leaves = {node: pages_to(node) for node in cache.tree.nodes() if not node.children}
            dead = {node for node, pages in leaves.items() if any(not g.table.frame[pages[-1]] for g in partial)}
            useless = {node for node, pages in leaves.items() if resume_point(partial, pages)[0] < len(pages)}
            before = {node: node.num_pages for node in leaves}
            cache.evict(1)
            changed = {node for node, count in before.items() if node.num_pages != count or not node.run}
            gone = {node for node in leaves if node.parent is not None and node not in set(cache.tree.nodes())}
            dead &= useless
            first = {node for node in changed | gone if node.tenant in {each.tenant for each in dead}}
            assert first <= useless, "a leaf was evicted before one that is worth nothing"
            for node in changed - gone:
                assert resume_point(partial, pages_to(node))[0] == len(pages_to(node)), "a useless end was kept"
            found, beside = found + bool(dead), beside + (0 < len(dead) < len(leaves))
    cache.audit()
    return found, beside


def check_orders(names: Sequence[str] = ()) -> None:
    happened = np.array([check_order(seed, names) for seed in range(60)]).sum(axis=0)
    assert happened.min() > 10, happened


@pytest.mark.parametrize("names", [(), ("one", "two")], ids=["alone", "tenants"])
def test_what_no_request_can_begin_after_goes_first(names: Sequence[str]) -> None:
    check_orders(names)


def check_spared() -> None:
    """Beside one that runs, no request is promised the part that is spared; alone it has all."""
    seen = 0
    for seed in range(80):
        choices, cache = arena(seed)
        (room,) = cache.parts.rooms
        if cache.plan.max_requests < 2:
            continue
        assert room.spared == room.total // SPARED > 0
        first, second = tokens(choices, 1), tokens(choices, cache.plan.context)
        assert not cache.admission.why_not(Claim(cache.match(second), cache.plan.pages_of(cache.plan.context)))
        kv = cache.begin(first)
        cache.extend([kv], [1])
        rows, reached = np.array([kv.row]), np.array([1])
        for num_pages in range(1, cache.plan.num_pages):
            hit = cache.match(second)
            fits = not cache.admission.why_not(Claim(hit, num_pages, rows, reached))
            counts = [group.num_held + group.needs(num_pages, 0) for group in cache.groups]
            assert fits == (room.lack(counts) + room.total // SPARED <= 0 and num_pages < cache.plan.num_pages)
            seen += not fits and room.lack(counts) <= 0
    assert seen > 10


def test_a_part_is_left_to_what_is_cached() -> None:
    check_spared()


def test_without_prefixes_nothing_is_spared() -> None:
    cache = KVCache(arena_plan(Choices.seeded(1)), share_prefixes=False)
    assert [room.spared for room in cache.parts.rooms] == [0]


def test_a_request_fits_around_frames_that_are_set_apart() -> None:
    """A frame with wrong bytes anywhere takes as many bytes as it has, and not the arena up to its place."""
    moved = 0
    for seed in range(40):
        choices, cache = arena(seed)
        compute(cache, tokens(choices, cache.plan.context))
        group = cache.groups[choices.below(2)]
        pages = np.flatnonzero(group.table.frame)
        if not len(pages):
            continue
        frames = group.table.frame[pages]
        page = int(pages[frames.argmax() if choices.chance(50) else frames.argmin()])
        frame = int(group.table.frame[page])
        cache.evict(cache.tree.num_evictable)
        if group.frames.allocator.ids.num_used:
            continue
        taken = group.frames.allocator.ids.take(group.num_free)
        group.frames.free_frames(taken[taken != frame])
        group.set_apart(frame)
        cache.audit()
        small = cache.plan.context // 2
        try:
            compute(cache, tokens(choices, small))
            moved += 1
        except OutOfPages:
            assert cache.plan.arena is not None
        group.use_again(frame)
        compute(cache, tokens(choices, cache.plan.context))
        cache.audit()
    assert moved > 5


@pytest.mark.parametrize("seed", range(8))
def test_a_copy_that_fails_changes_nothing(seed: int) -> None:
    choices, cache = arena(seed)
    copy = cache.parts.moved[-1]

    def fails(group: int, sources: Ids, targets: Ids) -> None:
        raise OutOfPages(group="copies", wanted=1, free=0)

    for _ in range(12):
        prompt = tokens(choices, choices.between(1, cache.plan.context))
        cache.parts.moved[-1] = fails if choices.chance(50) else copy
        kv = cache.begin(prompt)
        before = [group.table.frame.copy() for group in cache.groups]
        try:
            cache.extend([kv], [min(len(prompt) - kv.num_cached, 2 * cache.page_size)])
        except OutOfPages:
            now = [group.table.frame for group in cache.groups]
            gone = [(new != old) & (new != 0) for new, old in zip(now, before, strict=True)]
            assert not any(each.any() for each in gone), "a page has another frame, and nothing was copied"
        cache.finish(kv)
        cache.audit()
        cache.parts.moved[-1] = copy
        compute(cache, prompt)
