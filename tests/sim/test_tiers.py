"""Replays with tiers: right bytes on every way, nothing slower than without, much faster where sessions come back."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from quire.errors import InvalidInput, WrongContent
from quire.plan.budget import MemoryPlan
from quire.plan.step_cost import CostModel
from quire.settings.fields import PrefetchPolicy, WritePolicy
from quire.sim.pools import plain_pools
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.result import ReplayResult
from quire.sim.settings import SimulatedTiers
from quire.sim.tiers import SimulatedCopies, SimulatedStore, TierUse
from quire.sim.trace import Trace, open_trace
from quire.sim.workloads import WORKLOADS
from quire.spec.ids import Ids
from quire.tiers.store import Answer, StoreKey
from tests.changes import SIMULATOR, TIERS, in_turns, slow_unless_changed
from tests.covering import covering, each_of, few
from tests.sim.replays import HYBRIDS, replay_of, requests

FAST = CostModel.from_flags(prefill_rate=30_000, decode_ms=6, key_ns=1)
"""Prompts at 30,000 tokens/s: with 128 KiB a token, loading pays above about 4 GB/s."""
TOKEN_BYTES = 128 * 1024
RETURNING = "alternating:sessions=8,tokens=20000,turns=4,think=240"


def both(source: str, tiers: SimulatedTiers, *, limit: int | None = None, **settings: Any) -> list[ReplayResult]:
    """A replay without tiers and one with them, in a pool that holds an eighth of the trace, or its longest request."""
    trace, plan = trace_of(source, limit)
    tiers = tiers.changed(record_bytes=(16 * TOKEN_BYTES + 64,))
    beside = Replay(plan, FAST, ReplaySettings(tiers=tiers, **settings)).run(trace)
    return [without_tiers(source, limit, **settings), beside]


@cache
def trace_of(source: str, limit: int | None) -> tuple[Trace, MemoryPlan]:
    trace = open_trace(source, limit=limit, seed=1)
    lengths = [sum(each) for each in trace.lengths]
    pool = max(sum(lengths) // 8, max(lengths) * 5 // 4)
    return trace, plain_pools(pool, 16, context=max(lengths), max_running=16)


@cache
def without_tiers(source: str, limit: int | None, **settings: Any) -> ReplayResult:
    """Shared by the tests that compare with it."""
    trace, plan = trace_of(source, limit)
    return Replay(plan, FAST, ReplaySettings(**settings)).run(trace)


def use_of(result: ReplayResult) -> TierUse:
    assert result.tiers is not None
    return result.tiers


@covering(name=in_turns(WORKLOADS, 3, *SIMULATOR, *TIERS), host_bandwidth=[2.0, 8.0, 40.0])
def test_tiers_make_no_workload_slower(name: str, host_bandwidth: float) -> None:
    tiers = SimulatedTiers(host_tokens=1_000_000, host_bandwidth=host_bandwidth)
    without, beside = both(name, tiers, limit=32)
    (median,), (tiered,) = without.first_token_seconds((50,)), beside.first_token_seconds((50,))
    assert tiered <= 1.02 * median
    assert beside.mean_first_token_seconds <= 1.02 * without.mean_first_token_seconds
    assert [record.output_tokens for record in beside.records if record.end == "length"]


@slow_unless_changed(*SIMULATOR, *TIERS)
@pytest.mark.parametrize("name", few(["sessions", "chat", "agents", "alternating"], 2))
def test_storage_behind_a_small_host_makes_nothing_slower(name: str) -> None:
    tiers = SimulatedTiers(host_tokens=20_000, storage_tokens=1_000_000, host_bandwidth=40, storage_bandwidth=7)
    without, beside = both(name, tiers, limit=40)
    (median,), (tiered,) = without.first_token_seconds((50,)), beside.first_token_seconds((50,))
    assert tiered <= 1.02 * median
    assert beside.mean_first_token_seconds <= 1.02 * without.mean_first_token_seconds
    assert use_of(beside).measured["archive"] == pytest.approx(7e9, rel=0.2), "bytes of the records that rows stand for"


@slow_unless_changed(*SIMULATOR, *TIERS)
def test_a_slow_host_loads_nothing_and_says_why() -> None:
    without, beside = both("chat", SimulatedTiers(host_tokens=1_000_000, host_bandwidth=2), limit=100)
    use = use_of(beside)
    assert (use.loaded_bytes, use.host_hit_tokens) == (0, 0)
    (why,) = {change.why for change in use.changes if change.why}
    assert why.startswith("recompute is cheaper below 3.") and why.endswith("measured 2.0 GB/s")
    assert use.saved_bytes < without.prompt_tokens * TOKEN_BYTES / 50  # nor is much copied for nothing


@slow_unless_changed(*SIMULATOR, *TIERS)
def test_a_fast_host_loads() -> None:
    without, beside = both("chat", SimulatedTiers(host_tokens=1_000_000, host_bandwidth=40), limit=100)
    use = use_of(beside)
    assert use.host_hit_tokens > 0.1 * beside.prompt_tokens
    assert use.loaded_bytes >= use.host_hit_tokens * TOKEN_BYTES
    assert use.device_hit_tokens + use.host_hit_tokens == beside.hit_tokens > without.hit_tokens
    assert use.measured["load"] == pytest.approx(40e9, rel=0.2)
    assert not use.changes


@slow_unless_changed(*SIMULATOR, *TIERS)
@pytest.mark.parametrize("write", few(WritePolicy, 1))
def test_sessions_that_come_back_wait_a_third_at_most(write: WritePolicy) -> None:
    host = SimulatedTiers(host_tokens=400_000, host_bandwidth=25, write_policy=write)
    without, beside = both(RETURNING, host, check="reads")
    if write is WritePolicy.SELECTIVE:  # a history that no second request has used yet is not copied
        assert use_of(beside).host_hit_tokens == 0
        return
    assert without.first_token_seconds((50,))[0] >= 3 * beside.first_token_seconds((50,))[0]
    back = [
        [record for record in result.records if not record.request_id.endswith(".0")] for result in (without, beside)
    ]
    means = [np.mean([each.first_token - each.arrived for each in records if each.first_token]) for records in back]
    assert means[0] >= 3 * means[1]


@pytest.mark.slow
def test_sessions_come_back_from_storage_where_the_host_is_small() -> None:
    tiers = SimulatedTiers(host_tokens=30_000, storage_tokens=400_000, host_bandwidth=50, storage_bandwidth=60)
    without, beside = both(RETURNING, tiers, check="reads")
    use = use_of(beside)
    assert use.storage_hit_tokens > 0.3 * beside.prompt_tokens
    assert use.fetched_bytes >= use.storage_hit_tokens * TOKEN_BYTES
    assert without.first_token_seconds((50,))[0] >= 3 * beside.first_token_seconds((50,))[0]


@slow_unless_changed(*SIMULATOR, *TIERS)
@each_of("overlap", [False, True])
@each_of("write", WritePolicy)
@each_of("groups", HYBRIDS)
def test_what_comes_back_is_what_was_there(groups: str, write: WritePolicy, overlap: bool) -> None:
    """Every page that a step reads is compared with what it must hold, and all laws of the cache are checked."""
    tiers = SimulatedTiers(
        host_tokens=2_000,
        storage_tokens=20_000,
        write_policy=write,
        prefetch=PrefetchPolicy.WAIT_COMPLETE,
        load="always",
        record_bytes=(100_000,) * (1 if groups == "full" else 2),
    )
    trace = list(open_trace("alternating:sessions=3,tokens=600,turns=4,user=20"))
    replay = replay_of(
        num_pages=64, page_size=16, context=1_000, groups=groups, chunk=128, overlap=overlap, tiers=tiers
    )
    result = replay.run(trace)
    use = use_of(result)
    assert result.count("length") == 12
    assert use.loaded_bytes > 0 or write is WritePolicy.SELECTIVE


def test_a_load_that_brings_other_names_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedCopies.to_device

    def wrong(self: SimulatedCopies, group: int, device: Ids, host: Ids) -> None:
        real(self, group, device, np.roll(host, 1))

    monkeypatch.setattr(SimulatedCopies, "to_device", wrong)
    tiers = SimulatedTiers(host_tokens=4_000, load="always")
    trace = list(open_trace("alternating:sessions=3,tokens=600,turns=3,user=20"))
    with pytest.raises(WrongContent, match="holds 0 of its 16 tokens"):
        replay_of(num_pages=64, page_size=16, context=1_000, chunk=128, tiers=tiers).run(trace)


@slow_unless_changed(*SIMULATOR, *TIERS)
def test_the_same_replay_twice_is_the_same_and_checks_change_nothing() -> None:
    tiers = SimulatedTiers(host_tokens=30_000, storage_tokens=100_000, host_bandwidth=25, storage_bandwidth=5)
    first, second = (both("agents", tiers, limit=60)[1] for _ in range(2))
    checked = both("agents", tiers, limit=60, check="reads")[1]
    assert first.digest == second.digest == checked.digest
    assert first.seconds == checked.seconds
    assert first.tiers == second.tiers == checked.tiers


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidInput, match="twice or not at all"):
        replay_of(page_size=4, tiers=SimulatedTiers())
    with pytest.raises(InvalidInput, match="twice or not at all"):
        SimulatedTiers(host_tokens=1, host_memory=1)
    with pytest.raises(InvalidInput, match="host_bandwidth: Input should be greater than 0"):
        SimulatedTiers(host_tokens=1, host_bandwidth=-1.0)
    with pytest.raises(InvalidInput, match="holds no page"):
        replay_of(page_size=4, tiers=SimulatedTiers(host_tokens=3)).run(requests([(8, 2)]))


def test_a_host_in_bytes_holds_the_mix_of_the_device() -> None:
    plan = replay_of(num_pages=64, groups="state", frames=(64, 16)).cache.plan
    found = SimulatedTiers(host_memory=32 * 1000 + 8 * 100).host_frames(plan, (1000, 100))
    assert found == (32, 8)


def test_a_store_is_bounded_in_the_bytes_that_records_stand_for() -> None:
    store = SimulatedStore(3_000)
    keys = [StoreKey(bytes(16), bytes([number]) * 32, 0) for number in range(4)]

    def put(number: int, content: bytes) -> None:
        assert store.prepare(keys[number : number + 1], [1_000]) == [Answer.MISS]
        assert store.prepare(keys[number : number + 1], [1_000]) == [Answer.PENDING]
        store.put(keys[number : number + 1], [content])
        assert store.complete(keys[number : number + 1], [True]) == [Answer.HIT]

    for number in range(3):
        put(number, bytes([number]) * 8)
    room = bytearray(8)
    assert store.get(keys[:1], [room]) == [Answer.HIT] and room == bytes(8)
    put(3, b"\3" * 8)
    assert store.exists(keys) == [Answer.HIT, Answer.MISS, Answer.HIT, Answer.HIT]  # the one used longest ago is gone
    assert store.num_bytes == 3_000
    assert store.prepare(keys[1:2], [4_000]) == [Answer.RETRY]
    assert store.remove(keys) == 0  # which room was made for
    assert store.num_bytes == 0
