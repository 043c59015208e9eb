"""Engines by role: numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.errors import InvalidInput
from quire.plan.roles import MOST_BUSY, RoleLoad, plan_roles, sent_bytes
from quire.spec.group import ReachSpec
from quire.testing import small_plan

LOAD = RoleLoad(
    requests_per_s=10,
    prompt_tokens=2000,
    output_tokens=200,
    prefill_rate=10_000,
    decode_rate=1000,
    token_bytes=100_000,
    link_rate=10e9,
)


def test_a_plan_is_as_computed_by_hand() -> None:
    """A prompt takes 0.2 s: 2 s of work a second, three engines, busy 2/3. It waits 2/3 * 0.2 / (2 * 1/3) = 0.2 s, and
    its 200 MB travel in 0.02 s: 0.42 s, so 4.2 prompts of 200 MB are in flight."""
    found = plan_roles(LOAD)
    assert (found.prefill, found.decode) == (3, 3)
    assert found.prefill_busy == pytest.approx(2 / 3) and found.decode_busy == pytest.approx(2 / 3)
    assert found.prompt_s == pytest.approx(0.42) and found.prompts_in_flight == pytest.approx(4.2)
    assert found.decode_host_bytes == found.prefill_host_bytes == pytest.approx(280e6, abs=1)
    assert found.link_bytes_per_s == pytest.approx(2e9)
    assert found.prefill_link_bytes_per_s == found.decode_link_bytes_per_s == pytest.approx(2e9 / 3)


def test_what_is_cached_is_neither_computed_nor_sent() -> None:
    found = plan_roles(replace(LOAD, cached=0.5))
    assert (found.prefill, found.decode) == (2, 3)
    assert found.link_bytes_per_s == pytest.approx(1e9)


def test_a_slow_link_needs_more_engines() -> None:
    """2 GB/s over links of 0.5 GB/s, 70% busy: 5.7 of them."""
    found = plan_roles(replace(LOAD, link_rate=0.5e9))
    assert (found.prefill, found.decode) == (6, 6)


@pytest.mark.parametrize("rate", [0.1, 1.0, 7.0, 35.0, 1000.0])
def test_no_engine_is_busier_than_planned_and_one_less_would_be(rate: float) -> None:
    found = plan_roles(replace(LOAD, requests_per_s=rate))
    assert found.prefill_busy <= MOST_BUSY + 1e-6 and found.decode_busy <= MOST_BUSY + 1e-6
    if found.prefill > 1:
        assert found.prefill_busy * found.prefill / (found.prefill - 1) > MOST_BUSY


def test_a_window_sends_its_tail() -> None:
    plan = small_plan(16, 4, groups=("full", "window"), reaches=(ReachSpec(), ReachSpec("window", 24)))
    full, window = (group.layout.bytes_per_token for group in plan.groups)
    assert sent_bytes(plan, 100) == 100 * full + 24 * window
    assert sent_bytes(plan, 10) == 10 * (full + window)


@pytest.mark.parametrize("wrong", [{"requests_per_s": 0}, {"prefill_rate": -1}, {"cached": 1.0}, {"link_rate": 0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        replace(LOAD, **wrong)
