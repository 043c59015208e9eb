"""Plans that are kept between steps: the same answers as fresh ones, at a small part of their cost."""

from __future__ import annotations

import pytest

from tests.kernels.planner_case import check_plans


@pytest.mark.parametrize("seed", range(60))
def test_a_kept_plan_answers_like_a_fresh_one_and_like_the_definition(seed):
    check_plans(seed)
