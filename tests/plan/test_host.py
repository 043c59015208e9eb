"""Host memory: what is granted, what it holds, and that a refusal names a size that is then accepted."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import HostMemoryError, PlanError
from quire.memory.host_pool import HostPool
from quire.plan.budget import MemoryPlan
from quire.plan.host import HostMemory, frames_at_rest, frames_beside, host_budget, host_frames, largest_host_bytes
from quire.plan.mix import Mix, uniform
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.settings.setting import parse_bytes
from quire.spec.arena import ArenaLayout
from quire.spec.catalogue import CATALOGUE
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.layout import DType, Field, PageLayout
from quire.spec.model import ModelSpec
from quire.spec.record_size import records_bytes

GIB = 2**30


def plan_of(*groups: tuple[int, int]) -> MemoryPlan:
    """A plan of `(bytes per frame, device frames)` groups."""
    specs = tuple(
        GroupSpec(
            name=f"g{index}",
            layout=PageLayout(1, (Field(name="k", shape=(size,), dtype=DType.UINT8, layers=(0,)),)),
        )
        for index, (size, _) in enumerate(groups)
    )
    frames = tuple(count for _, count in groups)
    return MemoryPlan(page_size=1, groups=specs, num_pages=max(frames), context=10, max_requests=1, frames=frames)


def bytes_of(plan: MemoryPlan, frames: tuple[int, ...]) -> int:
    """By hand: header and payload up to a line, or to a block where frames are large; regions up to a block."""
    total = 0
    for group, count in zip(plan.groups, frames, strict=True):
        payload = group.layout.bytes_per_frame
        step = 4096 if payload >= 65536 else 64
        stride = (64 + payload + step - 1) // step * step
        total += (stride * (count + 1) + 4095) // 4096 * 4096
    return total


def mix(plan: MemoryPlan, count: int) -> tuple[int, ...]:
    most = max(plan.frames)
    return tuple(max(1, count * frames // most) for frames in plan.frames)


groups = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 300), st.integers(4000, 5000), st.integers(65000, 70000), st.integers(1, 2**22)),
        st.integers(1, 5000),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(groups, st.integers(0, 2**33))
def test_frames_fill_what_is_given_and_never_exceed_it(sizes: list[tuple[int, int]], given_bytes: int) -> None:
    plan = plan_of(*sizes)
    least = bytes_of(plan, mix(plan, 1))
    if given_bytes < least:
        with pytest.raises(PlanError) as error:
            host_frames(plan, given_bytes)
        named = parse_bytes(re.findall(r"--host-memory (\w+)", str(error.value))[0])
        assert least <= named < least + 2**20 * 11
        assert bytes_of(plan, host_frames(plan, named)) <= named
        return
    frames = host_frames(plan, given_bytes)
    count = max(frames)
    assert frames == mix(plan, count) and min(frames) >= 1
    assert bytes_of(plan, frames) <= given_bytes < bytes_of(plan, mix(plan, count + 1))


@settings(max_examples=30, deadline=None)
@given(groups, st.integers(2**12, 2**24))
def test_the_pool_takes_what_was_planned(sizes: list[tuple[int, int]], given_bytes: int) -> None:
    plan = plan_of(*sizes)
    try:
        frames = host_frames(plan, given_bytes)
    except PlanError:
        return
    with closing(HostPool(plan.groups, frames, threads=1)) as pool:
        assert pool.num_bytes == bytes_of(plan, frames) <= given_bytes


def test_an_arena_leaves_the_mix_of_the_host_as_it_is() -> None:
    """Ids in an arena reach as far as all of its bytes: they say nothing of the mix."""
    layouts = (PageLayout(4, (Field(name="k", shape=(size,), dtype=DType.UINT8, layers=(0,)),)) for size in (64, 400))
    groups = tuple(
        GroupSpec(name=name, layout=layout) for name, layout in zip(("full", "window"), layouts, strict=True)
    )
    split = MemoryPlan(page_size=4, groups=groups, num_pages=90, context=64, max_requests=2, frames=(90, 10))
    strides = (groups[0].layout.bytes_per_frame, groups[1].layout.bytes_per_frame)
    arena = replace(split, arena=ArenaLayout(split.pool_bytes, strides))
    assert arena.frames_of(1) > 2 * split.frames_of(1)
    assert host_frames(arena, 1 << 20) == host_frames(split, 1 << 20)


def test_a_plan_without_frames_of_its_own_has_as_many_for_each_group() -> None:
    plan = plan_of((100, 5), (5000, 5))
    plain = MemoryPlan(page_size=1, groups=plan.groups, num_pages=5, context=10, max_requests=1)
    assert host_frames(plain, 10**6) == host_frames(plan, 10**6) == (187, 187)


def hybrid(reach: ReachSpec, frames: tuple[int, int], length: int, **options: Any) -> MemoryPlan:
    """A whole group beside one of this reach, planned for requests of one length. A page has 16 tokens."""
    groups = tuple(
        GroupSpec(
            name=name,
            layout=PageLayout(16, (Field(name="k", shape=(64,), dtype=DType.UINT8, layers=(0,)),)),
            reach=each,
        )
        for name, each in (("full", ReachSpec()), ("part", reach))
    )
    asked = PlanSettings(mix=uniform(length, "requests"), **options)
    return MemoryPlan(
        page_size=16,
        groups=groups,
        num_pages=frames[0],
        context=length,
        max_requests=1,
        frames=frames,
        at_rest=frames_at_rest(groups, frames, asked, 16),
    )


WINDOW, STATE = ReachSpec("window", 256), ReachSpec("state")


def test_a_host_keeps_one_window_or_one_state_of_each_expected_request() -> None:
    """1,000 pages are 4 requests of 250 pages. A window is 16 of these."""
    assert hybrid(WINDOW, (1000, 576), 4000).at_rest == (1000, 64)
    assert hybrid(STATE, (1000, 12), 4000).at_rest == (1000, 4)


def test_requests_that_are_expected_to_be_long_have_grown_in_turns() -> None:
    """Of 128,000 tokens a host keeps 16 ends and no more than the device does, which may have been planned for one."""
    assert hybrid(STATE, (8000, 64), 128_000).at_rest == (8000, 16)
    assert hybrid(STATE, (8000, 3), 128_000).at_rest == (8000, 3)
    assert Mix(((100, 3), (20_000, 2)), "").in_turns(8192).counts == ((100, 3), (6667, 6))


@pytest.mark.parametrize(
    ("reach", "options"),
    [
        (WINDOW, {"swa_full_tokens_ratio": Fraction(1, 2)}),
        (STATE, {"mamba_full_memory_ratio": Fraction(1, 2)}),
        (STATE, {"max_mamba_cache_size": 500}),
    ],
)
def test_a_ratio_that_was_asked_for_is_that_of_the_host_too(reach: ReachSpec, options: dict[str, Any]) -> None:
    assert hybrid(reach, (1000, 500), 4000, **options).at_rest == (1000, 500)


def test_a_small_host_has_a_window_for_its_pages() -> None:
    """Else no request could begin on any of them."""
    plan = hybrid(WINDOW, (1000, 576), 4000)
    assert [frames_beside(plan, count) for count in (1, 10, 100, 500)] == [(1, 1), (10, 10), (100, 16), (500, 32)]


def test_a_host_of_a_planned_model_has_more_pages_than_the_mix_of_its_device_allows() -> None:
    spec = ModelSpec.from_config(CATALOGUE["gemma-3-27b"].config)
    plan = make_plan(spec, PlanSettings(kv_memory=8 * GIB, max_model_len=8192, max_num_batched_tokens=8192)).memory
    ours, mixed = host_frames(plan, 8 * GIB), host_frames(replace(plan, at_rest=()), 8 * GIB)
    assert ours[plan.frames.index(max(plan.frames))] > 1.3 * max(mixed)
    assert records_bytes(plan.groups, ours) <= 8 * GIB


# -- the budget


def budget(asked: int | str, available: int, *, limit: int | None = None, **more: int) -> int:
    device_bytes = more.pop("device_bytes", 10 * GIB)
    memory = HostMemory(total=64 * GIB, available=available, limit=limit)
    return host_budget(asked, memory, device_bytes=device_bytes, **more)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(0, 2**38), st.integers(1, 2**38))
def test_a_refusal_names_a_size_that_is_accepted(available: int, asked: int) -> None:
    try:
        granted = budget(asked, available, limit=available + 5)
    except HostMemoryError as error:
        assert asked > largest_host_bytes(available)
        named = re.findall(r"use --host-memory (\w+)", str(error))
        if named:
            size = parse_bytes(named[0])
            assert budget(size, available) == size
            # Also if a little less is there by then; and it is not far from all there is.
            assert budget(size, available - available // 200) == size
            assert size >= largest_host_bytes(available) * 0.98 - 2**20
        else:
            assert largest_host_bytes(available) < 2048
    else:
        assert granted == asked <= available


def test_a_container_is_named() -> None:
    with pytest.raises(HostMemoryError, match=r"8.00 GiB .* were asked for; 3.90 GiB of 64.00 GiB") as error:
        budget(8 * GIB, int(3.9 * GIB), limit=4 * GIB)
    assert "the container's limit is 4.00 GiB" in str(error.value)
    assert "Fix: use --host-memory 3685MiB." in str(error.value)
    with pytest.raises(HostMemoryError, match="no container limits it"):
        budget(8 * GIB, 4 * GIB)
    with pytest.raises(HostMemoryError, match=r"is none.* go without"):
        budget(8 * GIB, 1000, limit=4 * GIB)


def test_auto_is_twice_the_device_or_half_of_what_there_is() -> None:
    assert budget("auto", 60 * GIB, device_bytes=GIB) == 2 * GIB
    assert budget("auto", 60 * GIB, device_bytes=GIB, ranks=4) == 8 * GIB
    assert budget("auto", 16 * GIB, device_bytes=10 * GIB) == 15 * GIB // 2
    assert budget("auto", 0) == 0


@given(st.integers(0, 2**40))
def test_auto_is_always_granted_when_it_is_asked_for(available: int) -> None:
    size = budget("auto", available)
    assert budget(size, available) == size
