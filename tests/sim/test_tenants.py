"""Tenants in replays: what a quiet one hits beside a noisy one, and what their loads are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.cache import KVCache
from quire.errors import InvalidInput
from quire.plan.budget import MemoryPlan
from quire.settings.tenants import tenants_of
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.result import ReplayResult
from quire.sim.trace import open_trace
from quire.sim.trace_request import Trace, TraceRequest
from quire.spec.arena import ArenaLayout
from quire.spec.group import ReachSpec
from quire.spec.layout import DType, Field, PageLayout
from quire.testing import small_plan
from tests.changes import CORE, slow_unless_changed
from tests.sim.replays import COST

KINDS = {
    "full": ((ReachSpec(),), (2500,)),
    "window": ((ReachSpec(), ReachSpec("window", 256)), (2500, 1500)),
    "state": ((ReachSpec(), ReachSpec("state")), (2500, 500)),
}


def plan_of(kind: str) -> MemoryPlan:
    """40,000 tokens; in an arena, of about 10 GB."""
    reaches, frames = KINDS[kind.removeprefix("arena of ")]
    plan = small_plan(
        2500, 16, context=32_768, max_requests=64, groups=tuple(KINDS)[: len(reaches)], reaches=reaches, frames=frames
    )
    if not kind.startswith("arena"):
        return plan
    groups = [
        replace(
            group,
            layout=PageLayout(16, (Field(name="k", shape=(width,), dtype=DType.UINT8, layers=(0,)),)),
        )
        for group, width in zip(plan.groups, (2**17, 2**18), strict=True)
    ]
    strides = groups[0].layout.bytes_per_frame, groups[1].layout.bytes_per_frame
    arena = ArenaLayout(sum((n + 1) * stride for n, stride in zip(frames, strides, strict=True)), strides)
    return replace(plan, groups=tuple(groups), frames=(), arena=arena, num_pages=arena.most(0, 40))


def run(kind: str, requests: list[TraceRequest], tenants: dict[str, object] | None) -> ReplayResult:
    """A replay with every read checked."""
    plan = plan_of(kind)
    terms = tenants_of(tenants) if tenants is not None else ()
    return Replay(plan, COST, ReplaySettings(tenants=terms, check="all")).run(requests)


def hits(result: ReplayResult) -> dict[str, int]:
    return {each.request_id: each.hit_tokens for each in result.records if each.request_id.startswith("quiet")}


def of_quiet(trace: Trace) -> list[TraceRequest]:
    return [request for request in trace if request.namespace.salt == "quiet/"]


@slow_unless_changed(*CORE)
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("full", 0),
        pytest.param("full", 1, marks=pytest.mark.slow),
        pytest.param("window", 2, marks=pytest.mark.slow),
        pytest.param("state", 3, marks=pytest.mark.slow),
        ("arena of window", 4),
    ],
)
def test_a_quiet_tenant_hits_within_its_floor_as_if_it_were_alone(kind: str, seed: int) -> None:
    trace = open_trace("noisy:9,quiet:1", seed=seed)
    alone = hits(run(kind, of_quiet(trace), None))
    beside = run(kind, list(trace), {"quiet": {"floor": "60%"}, "noisy": {}})
    assert hits(beside) == alone, "request by request"
    without = run(kind, list(trace), None)
    assert sum(hits(without).values()) < 0.9 * sum(alone.values()), "without a floor it loses more than a tenth"
    assert beside.tenants is not None
    assert beside.tenants["quiet"]["lost_pages"] == 0 < beside.tenants["noisy"]["lost_pages"]
    assert beside.tenants["quiet"]["hit_tokens"] == sum(alone.values())


@pytest.mark.parametrize("floor", [0.1, 0.4, 0.8])
def test_a_floor_of_gigabytes_is_all_that_was_promised(floor: float) -> None:
    terms = tenants_of({"quiet": {"floor": f"{floor:.0%}"}, "noisy": {}})
    tenants = KVCache(plan := plan_of("arena of window"), tenants=terms).parts.tenants
    assert tenants is not None and plan.arena is not None
    assert tenants.limits()[0][0].tolist() == [0, int(plan.arena.room * floor), 0]


def test_loads_of_tenants() -> None:
    trace = open_trace("noisy:9,quiet:1", seed=4)
    quiet = of_quiet(trace)
    assert len(trace) == 400 and len(quiet) == 40
    other = of_quiet(open_trace("noisy:3,quiet:1,third:6", seed=4))
    assert [each.prompt.tolist() for each in quiet] == [each.prompt.tolist() for each in other], "whatever others do"
    again = of_quiet(open_trace("noisy:9,quiet:1", seed=5))
    assert [each.prompt.tolist() for each in quiet] != [each.prompt.tolist() for each in again]
    assert {each.session.partition(" ")[0] for each in trace} == {"noisy", "quiet"}


def test_a_size_in_which_floors_do_not_fit_is_refused_before_anything_runs() -> None:
    """What is cached within a floor stays, so that such a size would never be reached, and nothing would begin."""
    plan = plan_of("full")
    smaller = replace(plan, frames=(1200,), num_pages=1200)
    floor = 1500 * plan.groups[0].layout.bytes_per_frame
    settings = ReplaySettings(tenants=tenants_of({"quiet": {"floor": floor}, "noisy": {}}), sizes=((5.0, smaller),))
    with pytest.raises(InvalidInput, match="the floors need 12"):
        Replay(plan, COST, settings)


def test_a_floor_that_leaves_no_room_for_a_request_is_why_it_is_refused() -> None:
    trace = [each for each in open_trace("noisy:9,quiet:1", seed=0) if each.session.startswith("noisy")][:3]
    result = run("full", trace, {"quiet": {"floor": "99.9%"}, "noisy": {}})
    assert all("tenant 'noisy' can have" in each.refused for each in result.records)
