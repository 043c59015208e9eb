"""Tenants in rooms of other sizes than one another: arenas, unequal whole groups, frames that are set apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.cache.hold import HeldFrames, Reason
from quire.cache.tenant_growth import TenantGrowth
from quire.errors import InvalidInput, OutOfPages
from quire.loop.tenants import TenantsPart
from quire.memory.allocator import Move
from quire.plan.budget import MemoryPlan
from quire.scheduler.request import RequestState
from quire.spec.arena import ArenaLayout
from quire.spec.events import Namespace
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.ids import Tier
from quire.spec.layout import DType, Field, PageLayout
from quire.testing import small_plan
from tests.scheduler.tenant_server import NOISY, QUIET, TenantServer, text

SIZE = 4


def arena_plan(kind: str, width: int, *, part: int = 1) -> MemoryPlan:
    """One in so many parts of an arena of 400 small frames and 6 of `width` times their size."""
    fields = [(Field(name="k", shape=(n,), dtype=DType.UINT8, layers=(0,)),) for n in (1, width)]
    reaches = ReachSpec(), ReachSpec(kind, 2 * SIZE * (kind == "window"))
    groups = tuple(
        GroupSpec(name=reach.kind, layout=PageLayout(SIZE, each), reach=reach)
        for each, reach in zip(fields, reaches, strict=True)
    )
    small, large = (group.layout.bytes_per_frame for group in groups)
    arena = ArenaLayout((400 * small + 6 * large) // part, (small, large))
    return MemoryPlan(
        page_size=SIZE,
        groups=groups,
        num_pages=arena.most(0, 1),
        context=1600,
        max_requests=4,
        frames=(400, 6),
        arena=arena,
    )


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 3, length).tolist()


ROOMS = (("state", 150, 360), ("window", 150, 360), ("window", 20, 100))
FLOORS = (("state", 20), ("window", 8))
CEILINGS = (("window", 8, "40%"), ("state", 20, "60%"))


@pytest.mark.parametrize("case", ROOMS)
def test_each_of_many_tenants_finds_room_in_an_arena(case: tuple[str, int, int]) -> None:
    check_room(*case)


def check_room(kind: str, width: int, length: int) -> None:
    """What each has is less than a page with a state or a window, and together it is all."""
    names = [f"t{number}" for number in range(20)]
    server = TenantServer({name: {} for name in names}, plan=arena_plan(kind, width))
    requests = []
    for number in range(40):
        requests.append(server.add(Namespace(salt=f"{names[number % 20]}/"), prompt(number, length), most=2))
        server.run(requests[-1])
    assert sum(request.num_preemptions for request in requests) == 0
    assert server.tenants.lost_pages.sum() > 0


@pytest.mark.parametrize("case", FLOORS)
def test_a_floor_in_an_arena_holds_but_for_a_page_with_its_frames(case: tuple[str, int]) -> None:
    check_floor(*case)


def check_floor(kind: str, width: int) -> None:
    server = TenantServer({"quiet": {"floor": "40%"}, "noisy": {"weight": 1000}}, plan=arena_plan(kind, width))
    for number in range(12):
        server.run(server.add(QUIET, prompt(number, 120), most=2))
    floor, page = int(server.tenants.limits()[0][0, 1]), SIZE * (1 + width)
    assert server.tenants.used[0, 1] > floor
    for number in range(12):
        server.run(server.add(NOISY, prompt(100 + number, 300), most=2))
        server.tenants._look()
        assert server.tenants.used[0, 1] > floor - page
    assert server.tenants.used[0, 1] < floor + page, "all above the floor was lent"


@pytest.mark.parametrize("case", CEILINGS)
def test_a_ceiling_in_an_arena_counts_idle_windows_and_states(case: tuple[str, int, str]) -> None:
    check_ceiling(*case)


def check_ceiling(kind: str, width: int, ceiling: str) -> None:
    server = TenantServer({"noisy": {"ceiling": ceiling}}, plan=arena_plan(kind, width))
    most = int(server.tenants.limits()[1][0, 1])
    for number in range(6):
        request = server.add(NOISY, prompt(number // 2, 300 + 40 * number), most=2)
        for _ in range(200):
            server.step()
            server.tenants._look()
            assert server.tenants.used[0, 1] <= most
            if request.state is RequestState.FINISHED:
                break
        assert request.state is RequestState.FINISHED and request.num_preemptions == 0


def test_an_arena_of_tenants_shrinks() -> None:
    names = [f"t{number}" for number in range(12)]
    server = TenantServer({name: {} for name in names}, plan=arena_plan("state", 150))
    for number, name in enumerate(names):
        server.run(server.add(Namespace(salt=f"{name}/"), prompt(number, 360), most=2))
    resizing = server.cache.resizing
    resizing.aim(arena_plan("state", 150, part=2))
    for _ in range(3):
        resizing.go_on([], [], [0])
    assert resizing.reached
    server.cache.audit()


def test_what_frames_that_cannot_move_keep_from_an_arena_is_made_up_for_below_floors() -> None:
    """A save holds a state far from its end of the arena, and pages lack the bytes before it."""
    terms = {"quiet": {"floor": "50%"}, "noisy": {"floor": "40%"}}
    server = TenantServer(terms, plan=arena_plan("state", 150))
    cache, states = server.cache, server.cache.groups[1]
    server.run(server.add(QUIET, prompt(1, 40), most=2))
    states.evict(states.frames.num_used - 1, tenant=1)
    (page,) = np.flatnonzero(states.table.frame).astype(np.int32)
    lease = cache.tree.pin(next(node for node in cache.tree.nodes() if page in node.pages))
    frames = [HeldFrames(1, Tier.DEVICE, np.array([page]))]
    hold = cache.parts.holds.add(Reason.SAVE, frames, lease=lease)
    server.run(server.add(QUIET, prompt(2, 760), most=2))
    states.evict(states.frames.num_used - 2, tenant=1)
    assert cache.plan.arena is not None
    last = cache.plan.arena.most(1, cache.groups[0].frames.num_used)
    cache._growth.move(Move(1, states.table.frame[[page]], np.array([last], dtype=np.int32)))
    cache.parts.fixed.append(lambda group: [np.array([last], dtype=np.int32)] * group)
    server.tenants._look()
    assert server.tenants.used[0, 1] < server.tenants.limits()[0][0, 1]
    request = server.add(NOISY, prompt(3, 240), most=2)
    server.run(request)
    assert request.num_preemptions == 0 and server.tenants.lost_pages[1] > 0
    cache.parts.holds.release(hold)
    cache.audit()


def test_page_ids_of_an_arena_have_floors() -> None:
    """Short pages use them up before the bytes."""
    plan = replace(arena_plan("window", 2), num_pages=100, context=400)
    server = TenantServer({"quiet": {"floor": "50%"}, "noisy": {"floor": "50%"}}, plan=plan)
    for number in range(6):
        server.run(server.add(NOISY, prompt(number, 80), most=2))
    quiet = server.add(QUIET, prompt(50, 180), most=2)
    server.run(quiet)
    assert quiet.num_preemptions == 0
    for number in range(6):
        server.run(server.add(NOISY, prompt(10 + number, 180), most=2))
    assert server.add(QUIET, prompt(50, 180), most=2) and server.step()[0].num_cached == 176


def test_a_request_within_its_floor_passes_in_an_arena() -> None:
    """Its floor has room for its pages and one state, and not for a state with each page."""
    server = TenantServer({"noisy": {}, "quiet": {"floor": "40%"}}, plan=arena_plan("state", 50))
    running = server.add(NOISY, prompt(1, 280), most=40)
    assert server.step() == [running]
    for _ in range(8):
        server.step()
    large, quiet = server.add(NOISY, prompt(2, 900), most=2), server.add(QUIET, prompt(3, 200), most=2)
    assert server.step() == [quiet] and large.state is RequestState.WAITING
    server.run(running, large, quiet)


def test_a_request_needs_frames_of_the_smaller_of_two_groups() -> None:
    """Where one group has more frames than pages, its floors are more than there will ever be."""
    plan = small_plan(40, SIZE, max_requests=4, context=160, groups=("full", "other"), frames=(80, 40))
    server = TenantServer({"quiet": {"floor": "50%"}, "noisy": {"floor": "40%"}}, plan=plan)
    for number in range(3):
        server.run(server.add(NOISY, prompt(number, 56), most=2))
    request = server.add(QUIET, prompt(9, 40), most=2)
    server.run(request)
    assert request.num_preemptions == 0
    server.tenants._look()
    assert server.tenants.used[1, 2] >= 16, "that many are the floor in the smaller group"


def test_floors_of_all_memory_leave_out_what_is_set_apart() -> None:
    server = TenantServer({"quiet": {"floor": "50%"}, "noisy": {"floor": "50%"}})
    group = server.cache.groups[0]
    group.set_apart(int(group.frames.allocator.ids.take(1)[0]))
    for space in (QUIET, NOISY):
        request = server.add(space, text(1, 15), most=2)
        server.run(request)
        assert request.num_preemptions == 0
    assert server.tenants.limits()[0].tolist() == [[0, 19, 19]]
    waits = server.add(QUIET, text(2, 18), most=2)
    server.run(waits)
    group.use_again(group.quarantined[0])
    server.tenants._look()
    assert server.tenants.limits()[0].tolist() == [[0, 20, 20]]


def test_floors_of_all_bytes_without_padding() -> None:
    terms: dict[str, Any] = {"quiet": {"floor": 21}, "noisy": {"floor": 20}}
    part = TenantsPart(TenantServer(terms, num_pages=41).tenants)
    part.fits(small_plan(41, 1))
    with pytest.raises(InvalidInput, match=r"the floors need 102.5% of the 40 B of frames in 41 B of KV memory"):
        part.fits(small_plan(40, 1))


def test_an_eviction_that_frees_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TenantServer({"noisy": {}})
    server.serve(NOISY, text(1, 30))
    monkeypatch.setattr(TenantGrowth, "_evict", lambda growth, *given: None)
    kv = server.cache.begin(np.array(text(2, 20), dtype=np.int32), QUIET)
    with pytest.raises(OutOfPages):
        server.cache.extend([kv], 20)
    server.cache.audit()
