"""Tenants on a scheduler with a model that needs no device: floors, ceilings, turns, and a machine of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.cache import KVCache
from quire.errors import InvalidInput, RequestTooLarge
from quire.offload import offload_of
from quire.scheduler.request import RequestState
from quire.settings.setting import exact_bytes
from quire.settings.tenants import tenants_of
from quire.spec.events import Namespace
from quire.testing import small_plan
from tests.changes import CORE, slow_unless_changed
from tests.choices import drawn
from tests.scheduler.tenant_machine import TenantMachine, run_tenants
from tests.scheduler.tenant_server import NOISY, QUIET, TenantServer, text


def test_what_lies_within_a_floor_stays() -> None:
    server = TenantServer({"quiet": {"floor": "25%"}, "noisy": {}})
    assert server.serve(QUIET, text(1, 9)) == 0
    for number in range(12):
        server.serve(NOISY, text(number, 12))
    assert server.serve(QUIET, text(1, 9)) == 8, "all but the last token of a prompt can be cached"


def test_a_floor_is_lent_to_what_is_cached() -> None:
    server = TenantServer({"quiet": {"floor": "50%"}, "noisy": {}})
    for number in range(6):
        server.serve(NOISY, text(number, 6))
    assert server.tenants.in_bytes()[1].tolist() == [0, 0, 36], "all memory is used while its owner does not want it"
    assert server.serve(QUIET, text(3, 20)) == 0
    assert server.tenants.in_bytes()[1].tolist()[1:] == [20, 20]
    assert server.tenants.lost_pages[2] == 16


def test_running_requests_of_others_take_nothing_of_a_floor() -> None:
    server = TenantServer({"quiet": {"floor": "50%"}, "noisy": {}})
    first, second = server.add(NOISY, text(1, 12), most=6), server.add(NOISY, text(2, 12), most=6)
    assert server.step() == [first]
    assert "promised to other tenants" in second.wait_reason
    quiet = server.add(QUIET, text(1, 12), most=6)
    assert server.step() == [quiet], "it passes a request that waits for room, within its floor"
    server.run(first, second, quiet)
    assert server.scheduler.num_preemptions == 0


def test_a_large_request_is_passed_within_floors_only() -> None:
    server = TenantServer({"quiet": {"floor": "25%"}, "noisy": {}, "third": {}})
    third = Namespace(salt="third/")
    running = server.add(third, text(1, 16), most=8)
    assert server.step() == [running]
    large = server.add(NOISY, text(2, 18), most=2)
    small, quiet = server.add(third, text(3, 3), most=1), server.add(QUIET, text(4, 8), most=1)
    assert server.step() == [quiet]
    assert small.wait_reason == "a request of another tenant, which came before, waits for room"
    server.run(running, large, small, quiet)


def test_a_small_request_does_not_pass_a_large_one_of_its_tenant() -> None:
    server = TenantServer({"noisy": {"ceiling": "50%"}, "quiet": {}})
    running = server.add(NOISY, text(1, 8), most=6)
    assert server.step() == [running]
    large, small = server.add(NOISY, text(2, 14), most=2), server.add(NOISY, text(3, 2), most=1)
    assert server.step() == [] and small.state is RequestState.WAITING
    server.run(running, large, small)


def test_no_request_within_a_floor_is_preempted() -> None:
    server = TenantServer({"quiet": {"floor": "25%"}, "noisy": {}})
    first, second = server.add(NOISY, text(1, 12), most=14), server.add(NOISY, text(2, 12), most=14)
    assert server.step() == [first, second]
    quiet = server.add(QUIET, text(3, 6), most=4)
    assert server.step() == [quiet], "it is the last one, which is preempted first where there are no tenants"
    server.run(first, second, quiet)
    assert (first.num_preemptions, quiet.num_preemptions) == (0, 0) and second.num_preemptions > 0


def test_what_has_most_above_its_floor_goes_first() -> None:
    server = TenantServer({"quiet": {}, "noisy": {}, "third": {"weight": 4}})
    third = Namespace(salt="third/")
    server.serve(QUIET, text(1, 4))
    server.serve(third, text(1, 14))
    server.serve(NOISY, text(1, 12))
    server.serve(NOISY, text(2, 14))
    assert server.serve(QUIET, text(1, 4)) == 3 and server.serve(third, text(1, 14)) == 13
    assert server.serve(NOISY, text(1, 12)) < 11, "the one that has most by weight loses, to itself too"


def test_a_full_tenant_blocks_no_other() -> None:
    server = TenantServer({"noisy": {"ceiling": "30%"}, "quiet": {}})
    first, second = server.add(NOISY, text(1, 9), most=2), server.add(NOISY, text(2, 9), most=2)
    quiet = server.add(QUIET, text(1, 20), most=2)
    assert set(server.step()) == {first, quiet}
    assert "its ceiling is 30.0%" in second.wait_reason
    server.run(first, second, quiet)
    assert server.tenants.used[0, 1] <= 12


def test_a_full_tenant_loses_its_own_pages() -> None:
    server = TenantServer({"noisy": {"ceiling": "30%"}, "quiet": {}})
    server.serve(QUIET, text(1, 12))
    for number in range(5):
        server.serve(NOISY, text(number, 10))
        server.tenants._look()
        assert server.tenants.used[0, 1] <= 12
    assert server.serve(QUIET, text(1, 12)) == 11 and server.tenants.lost_pages[2] == 0


def test_what_can_never_run_is_refused_at_once() -> None:
    server = TenantServer({"noisy": {"ceiling": "30%"}, "quiet": {"floor": "50%"}})
    with pytest.raises(RequestTooLarge, match=r"tenant 'noisy' can have 12 of 40.*its ceiling is 30%"):
        server.add(NOISY, text(1, 12), most=2)
    with pytest.raises(RequestTooLarge, match=r"tenant 'default' can have 20 of 40.*promised to others: 50.0%"):
        server.add(Namespace(), text(1, 21), most=2)
    assert server.serve(QUIET, text(1, 39)) == 0


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.5, 2.0)])
def test_turns_are_by_weight(weights: tuple[float, float]) -> None:
    """Both have always requests that wait: what each gets is as its weight."""
    server = TenantServer({"quiet": {"weight": weights[0]}, "noisy": {"weight": weights[1]}}, max_running=1)
    began = Counter[str]()
    queue = [server.add(space, text(number, 5)) for number in range(60) for space in (NOISY, QUIET)]
    while sum(began.values()) < 48:
        for request in server.step():
            began[request.namespace.salt] += 1
            tokens = request.num_tokens - request.num_cached
            server.turns.charge(request.namespace, tokens, begins=True)
    assert began["quiet/"] == pytest.approx(48 * weights[0] / sum(weights), abs=2)
    assert queue[0].state is RequestState.FINISHED


def test_who_was_away_has_saved_nothing() -> None:
    server = TenantServer({"quiet": {}, "noisy": {}})
    order = server.turns.take_turns({2: "n"}, lambda _: 10)
    assert list(order) == ["n"]
    for tokens in (1000, 10):
        server.turns.charge(NOISY, tokens, begins=True)
    list(server.turns.take_turns({2: "n"}, lambda _: 10))
    order = list(server.turns.take_turns({1: "qqqqqq", 2: "nnnnnn"}, lambda _: 10))
    assert order[:6].count("n") == 2, "the one that comes back is as if it had always been there"


def test_who_could_not_begin_has_saved_nothing_and_stops_no_clock() -> None:
    server = TenantServer({"quiet": {}, "noisy": {}, "third": {}})
    for _ in range(10):
        list(server.turns.take_turns({2: "n", 3: "t"}, lambda _: 10))
        server.turns.charge(NOISY, 100, begins=True)
    order = list(server.turns.take_turns({1: "qqqq", 2: "nnnn", 3: "tttt"}, lambda _: 100))
    assert order.index("n") <= 3 and order[:6].count("t") == 2


def test_a_session_of_a_tenant_above_its_floor_ends_for_others() -> None:
    server = TenantServer({"noisy": {"floor": "10%"}, "quiet": {"floor": "10%"}}, kinds="state")
    server.serve(NOISY, text(1, 10), session="s")
    assert server.cache.sessions.num_held == 1
    request = server.add(Namespace(), text(2, 26), most=2)
    server.run(request)
    assert server.cache.sessions.num_held == 0 and request.num_preemptions == 0


def test_terms_change_while_requests_run() -> None:
    server = TenantServer({"noisy": {}, "quiet": {}})
    for number in range(4):
        server.serve(NOISY, text(number, 9))
    request = server.add(NOISY, text(7, 20), most=5)
    server.step()
    with pytest.raises(InvalidInput, match="request r4 of tenant 'noisy' needs 24 pages, and could have 12 then"):
        server.tenants.change("noisy", {"ceiling": "30%"}, [("r4", NOISY, 24)])
    server.tenants.change("quiet", {"floor": "40%"})
    with pytest.raises(InvalidInput, match=r"the floors need 110.0% of .* KV memory: 'noisy' 70% .*, 'quiet' 40% "):
        server.tenants.change("noisy", {"floor": "70%"})
    for ceiling in ("0%", "2%"):  # of 40 pages
        with pytest.raises(
            InvalidInput, match=f"tenant 'noisy' has a ceiling of {ceiling}, and the smallest request takes 2.50%"
        ):
            server.tenants.change("noisy", {"ceiling": ceiling})
    with pytest.raises(InvalidInput, match="there is no tenant 'other'"):
        server.tenants.change("other", {"floor": "1%"})
    assert [str(each.floor) for each in server.tenants.terms] == ["0%", "0%", "40%"]
    server.run(request)
    server.tenants.change("noisy", {"ceiling": "30%"})
    server.serve(NOISY, text(9, 4))
    server.tenants._look()
    assert server.tenants.used[0, 1] <= 12, "what it has above its ceiling goes when it asks next"


def test_retentions_and_sessions_within_a_floor_stay() -> None:
    server = TenantServer({"quiet": {"floor": "25%"}, "noisy": {}})
    retention = offload_of(server.cache).retention
    for space in (QUIET, NOISY):
        server.serve(space, text(1, 9))
        retention.retain(np.array(text(1, 9), dtype=np.int32), space, ttl_seconds=60.0)
    assert len(retention) == 2
    server.serve(NOISY, text(2, 26))
    kept = sorted(each.tokens for each in retention.listing().retentions)
    assert kept[-1] == 9 > kept[0], "that of the tenant that lacks room becomes shorter, and no other"
    assert server.serve(QUIET, text(1, 9)) == 8


def test_a_release_ends_what_tenants_keep_within_their_floors() -> None:
    server = TenantServer({"quiet": {"floor": "25%"}, "noisy": {"floor": "25%"}})
    retention, resizing = offload_of(server.cache).retention, server.cache.resizing
    for space in (QUIET, NOISY):
        server.serve(space, text(1, 4), session="s" + space.salt)
        server.serve(space, text(2, 4))
        retention.retain(np.array(text(2, 4), dtype=np.int32), space, ttl_seconds=60.0)
    assert server.cache.sessions.num_held == 2 == len(retention)
    resizing.aim(resizing.plan, released=True)
    for _ in range(3):
        resizing.go_on([], [], [0])
    assert resizing.reached and not server.cache.sessions.num_held and not retention.num_pages
    server.cache.audit()


def test_a_prompt_longer_than_a_share_of_windows_goes_on_in_parts() -> None:
    server = TenantServer({"noisy": {"ceiling": "50%"}, "quiet": {}}, kinds="window")
    request = server.add(NOISY, text(1, 18), most=2)
    server.run(request)
    assert request.num_preemptions == 0 and server.cache.groups[1].room.total == 12


def test_what_a_full_tenant_keeps_ends_for_its_own_requests() -> None:
    server = TenantServer({"noisy": {"ceiling": "30%"}, "quiet": {}})
    retention = offload_of(server.cache).retention
    server.serve(NOISY, text(1, 9))
    kept = retention.retain(np.array(text(1, 9), dtype=np.int32), NOISY, ttl_seconds=60.0, pin=True)
    assert not kept.pinned and kept.granted_tokens == 9 and "its tenant has a ceiling" in kept.reason
    request = server.add(NOISY, text(2, 8), most=2)
    server.run(request)
    assert request.num_preemptions == 0 and retention.num_pages < 9


def test_pins_and_floors_find_room_beside_each_other() -> None:
    server = TenantServer({"quiet": {"floor": "25%"}, "noisy": {}}, context=10)
    retention = offload_of(server.cache).retention
    for number in range(3):
        server.serve(NOISY, text(number, 9))
        retention.retain(np.array(text(number, 9), dtype=np.int32), NOISY, ttl_seconds=60.0, pin=True)
    assert retention.num_pinned == 20, "of 40 pages 10 are promised, and the longest request needs 10"
    with pytest.raises(InvalidInput, match="retentions have pinned 20 pages, and with these terms 10 could be"):
        server.tenants.change("quiet", {"floor": "50%"}, num_pinned=retention.num_pinned)
    assert str(server.tenants.terms[1].floor) == "25%"


def test_checkpoints_within_a_floor_stay() -> None:
    server = TenantServer({"quiet": {"floor": "50%"}, "noisy": {}}, kinds="state")
    server.serve(QUIET, text(1, 9), most=2)
    hits = server.serve(QUIET, [*text(1, 9), 1, 2], most=2)
    assert hits > 0
    for number in range(8):
        server.serve(NOISY, text(number, 9), most=2)
    assert server.serve(QUIET, [*text(1, 9), 1, 2], most=2) >= hits


@slow_unless_changed(*CORE)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_life(data: st.DataObject) -> None:
    choices = drawn(data)
    machine = TenantMachine(choices)
    for _ in range(25):
        machine.step(choices)
    machine.end()


@slow_unless_changed(*CORE)
def test_forty_lives() -> None:
    happened = sum((run_tenants(seed, 60) for seed in range(40)), Counter[str]())
    names = ("hit", "evicted", "lacks room", "too large", "preempted", "changed", "not changed")
    assert all(happened[name] > 5 for name in names), happened


@pytest.mark.parametrize("terms", [{"a": {"floor": "10%"}}, {"a": {"floor": "4B"}}])
def test_what_an_accepted_request_needs_outlives_a_release(terms: dict[str, Any]) -> None:
    """While memory is released its size is 0, and the limit afterwards must have room for the request."""
    plan = small_plan(40, 1, max_requests=4, groups=("full",), frames=(40,))
    cache = KVCache(plan, tenants=tenants_of(terms))
    promised = cache.admission.units_for([(Namespace(), 30)])
    assert promised[0] >= 30
    cache.resizing.aim(replace(plan, frames=(20,), num_pages=20), released=True)
    cache.resizing.go_on([], [], [0])
    assert cache.admission.units_for([(Namespace(), 30)]) == promised


@pytest.mark.parametrize("pages", [3, 7, 49, 98, 161])
def test_a_ceiling_of_the_smallest_request_is_enough(pages: int) -> None:
    """Shares of bytes are floats, and one page is one page."""
    plan = small_plan(pages, 16, context=4096, max_requests=4)
    page = plan.room_bytes // pages
    cache = KVCache(plan, tenants=tenants_of({"a": {"ceiling": page}}))
    assert cache.admission.largest_request(Namespace(salt="a/")) == 17
    with pytest.raises(InvalidInput, match=f"Fix: give it {exact_bytes(page)} or more"):
        KVCache(plan, tenants=tenants_of({"a": {"ceiling": page - 1}}))
