"""Replays of engines with roles: every page checked, exactly reproducible, and failures that cost time only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.sim.replay import ReplaySettings
from quire.sim.roles import Roles, RolesResult
from quire.sim.settings import SimulatedLink, SimulatedTiers
from quire.spec.speculation import SpeculativeConfig
from quire.testing import small_plan
from tests.changes import SIMULATOR, TRANSFER, slow_unless_changed
from tests.covering import covering
from tests.sim.replays import COST, HYBRIDS, requests

TRACE = requests([(60 + 7 * at % 40, 12) for at in range(20)], shared=24, gap=0.004)


def run(
    num_prefill: int,
    num_decode: int,
    *,
    groups: str = "full",
    trace: Any = TRACE,
    drafts: int = 0,
    acceptance: float | None = None,
    **link: Any,
) -> RolesResult:
    plan = small_plan(96, 4, max_requests=8, **HYBRIDS[groups])
    if drafts:
        plan = replace(plan, speculation=SpeculativeConfig.parse({"method": "ngram", "num_steps": drafts}))
    tiers = SimulatedTiers(host_tokens=1600, record_bytes=(1 << 16,) * len(plan.groups))
    settings = ReplaySettings(check="all", chunk=16, tiers=tiers, acceptance=acceptance)
    link = {"least_tokens": 8, **link}
    return Roles(plan, COST, settings, SimulatedLink(**link), num_prefill=num_prefill, num_decode=num_decode).run(trace)


@covering(groups=HYBRIDS, engines=[(1, 1), (2, 3)])
def test_prompts_arrive_from_prefill_engines(groups: str, engines: tuple[int, int]) -> None:
    """Every read of every step is compared with what it has to hold, also of pages that came over the link."""
    result = run(*engines, groups=groups)
    assert result.requests == len(TRACE) and result.asks > 0
    assert result.received_tokens > 0 and result.received_bytes > 0 and not result.fallbacks
    assert result.hit_tokens + result.received_tokens < result.prompt_tokens
    again = run(*engines, groups=groups)
    assert again == result


def test_without_roles_nothing_is_asked() -> None:
    result = run(0, 2)
    assert result.requests == len(TRACE)
    assert (result.asks, result.received_tokens, result.fallbacks) == (0, 0, {})
    assert result.output_tokens == 12 * len(TRACE)
    assert result.hit_tokens + result.computed_tokens == result.prompt_tokens


@slow_unless_changed(*SIMULATOR, *TRANSFER)
@pytest.mark.parametrize("acceptance", [0.7, None])
def test_engines_that_answer_draft(acceptance: float | None) -> None:
    """As given, or as the trace records it; engines that compute prompts draft nothing."""
    trace = [replace(each, acceptance=0.7) for each in TRACE] if acceptance is None else TRACE
    plain, apart, same = run(1, 2), *(run(n, 2, trace=trace, drafts=3, acceptance=acceptance) for n in (1, 0))
    assert plain.speculation is None and apart.speculation is not None and same.speculation is not None
    for found in (apart.speculation, same.speculation):
        assert found["accepted_tokens"] / found["draft_tokens"] == pytest.approx(0.5, abs=0.2)
        assert 1.5 < found["tokens_per_step"] < 4
    assert apart.output_tokens == plain.output_tokens and apart.received_tokens > 0
    assert apart.seconds < plain.seconds


@slow_unless_changed(*SIMULATOR, *TRANSFER)
@pytest.mark.parametrize("failures", [0.3, 1.0])
def test_a_failed_write_costs_time_and_no_token(failures: float) -> None:
    whole, broken = run(1, 2), run(1, 2, link_failures=failures, failure_seed=3)
    assert broken.fallbacks["unsent"] > 0 and set(broken.fallbacks) == {"unsent"}
    assert broken.output_tokens == whole.output_tokens and broken.requests == whole.requests
    assert broken.received_tokens < whole.received_tokens
    if failures == 1.0:
        assert broken.received_tokens == broken.received_bytes == 0 and broken.fallbacks["unsent"] == broken.asks
    other = run(1, 2, link_failures=failures, failure_seed=4)
    assert (other.digest == broken.digest) == (failures == 1.0), "the seed decides which writes fail"


def test_a_failed_write_is_repeated_once() -> None:
    """As an engine does. Whole pages of each prompt are one write of 10 ms."""
    plan = small_plan(96, 4, max_requests=8)
    tiers = SimulatedTiers(host_tokens=1600, record_bytes=(1000,), host_bandwidth=1e6)
    settings = ReplaySettings(check="all", chunk=64, tiers=tiers)

    def first_token(seed: int) -> tuple[float, bool]:
        link = SimulatedLink(link_rate=8e5, latency=0.0, least_tokens=8, link_failures=0.5, failure_seed=seed)
        result = Roles(plan, COST, settings, link, num_prefill=1, num_decode=1).run(requests([(33, 1)]))
        return round(result.ttft_s[0], 3), bool(result.fallbacks)

    found = [first_token(seed) for seed in range(40)]
    once, twice = sorted({seconds for seconds, is_local in found if not is_local})
    assert 0.008 <= twice - once <= 0.012
    assert 2 <= sum(is_local for _, is_local in found) <= 18, "a quarter fails twice"


def test_a_slow_link_ends_at_the_deadline() -> None:
    result = run(1, 1, link_rate=1e3, transfer_seconds=0.05)
    assert result.fallbacks["deadline"] > 0 and result.requests == len(TRACE)


@slow_unless_changed(*SIMULATOR, *TRANSFER)
def test_writes_that_outlive_their_asks_are_ended() -> None:
    """They wait on the link for longer than a prefill engine waits for writes of an ask that has ended."""
    result = run(1, 1, link_rate=1e5)
    assert result.fallbacks["deadline"] > 0 and result.requests == len(TRACE)


@slow_unless_changed(*SIMULATOR, *TRANSFER)
def test_a_slower_link_makes_the_first_token_later() -> None:
    first = [run(1, 1, link_rate=bandwidth).ttft_s[0] for bandwidth in (1e12, 1e8, 2e7)]
    assert first[0] < first[1] < first[2]


def test_one_prompt_takes_as_long_as_by_hand() -> None:
    """A prompt of 33 tokens in steps of 16: the whole pages, 32 tokens, are computed by the prefill engine."""
    plan = small_plan(96, 4, max_requests=8)
    tiers = SimulatedTiers(host_tokens=1600, record_bytes=(1000,), host_bandwidth=1e6)
    link = SimulatedLink(link_rate=8e5, latency=0.0, least_tokens=8)
    result = Roles(
        plan, COST, ReplaySettings(check="all", chunk=16, tiers=tiers), link, num_prefill=1, num_decode=1
    ).run(requests([(33, 1)]))
    assert result.received_tokens == 32 and result.received_bytes == 8000
    # The prefill engine takes two steps of 5.5 ms. Then 8 records of 1,000 bytes take 10 ms, and one token is computed
    # by the decode engine in 5.5 ms. Polls and copies to and from the host are the rest.
    assert 0.0265 <= result.ttft_s[0] <= 0.0265 + 0.012
