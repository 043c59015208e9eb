"""The canary's budget: all that it takes is bounded by its share, and looking at pages never stops."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from quire.canary.budget import LEAST_S, Budget
from tests.changes import CANARY, slow_unless_changed

SHARE = 0.01
SLICE_S = 0.02  # of savings, the most


def live(budget: Budget, steps: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Steps of so many seconds, each of which needs so many of the canary, which spends all that it has saved.
    Returns the time that passed, what was spent on pages, and what steps needed."""
    now = looked = needed = 0.0
    budget.earn(now)
    for step_s, beside_s in steps:
        budget.beside(beside_s)
        now, needed = now + step_s, needed + beside_s
        if budget.earn(now):
            looked += (spent := budget.saved_s)
            budget.spend(spent, 1)
    return now, looked, needed


@slow_unless_changed(*CANARY)
@given(st.lists(st.tuples(st.floats(0.001, 0.05), st.floats(0, 0.001)), min_size=200, max_size=400))
def test_the_share_bounds_everything_and_a_quarter_is_for_pages(steps: list[tuple[float, float]]) -> None:
    budget = Budget(SHARE)
    passed, looked, needed = live(budget, steps)
    assert math.isclose(budget.spent_s, looked + needed, abs_tol=1e-9)
    earned = passed * SHARE
    assert looked >= earned / 4 - LEAST_S - 1e-9
    if needed <= earned / 2:  # there is room for both, but for what is not taken yet
        assert looked + needed <= earned + SLICE_S + 1e-9


def test_steps_that_need_nothing_leave_all_for_pages() -> None:
    passed, looked, _ = live(Budget(SHARE), [(0.01, 0.0)] * 1000)
    assert math.isclose(looked, passed * SHARE, abs_tol=LEAST_S)


def check_short_steps() -> None:
    """Steps need half of the share, or twice the share: it bounds both, and pages are looked at."""
    for beside_s in (0.5e-4, 2e-4):
        passed, looked, needed = live(Budget(SHARE), [(0.01, beside_s)] * 1000)
        earned = passed * SHARE
        assert looked >= earned / 4 - LEAST_S
        assert looked + min(needed, earned * 0.75) <= earned + SLICE_S


def test_short_steps() -> None:
    check_short_steps()


def test_without_a_bound_it_never_waits() -> None:
    budget = Budget(math.inf)
    budget.beside(1e6)
    assert budget.earn(0.0)
    assert budget.earn(1.0)
    assert budget.items() > 1e9
