"""Quantiles of a histogram are in the buckets of those of the values."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.counters import Histogram

BOUNDS = (1.0, 2.0, 5.0, 10.0)
VALUES = st.lists(st.floats(0, 20), max_size=30)


@given(VALUES, VALUES, st.sampled_from([0.01, 0.5, 0.95, 1.0]))
def test_a_quantile_is_in_the_bucket_of_the_value_there(before: list[float], after: list[float], part: float) -> None:
    histogram = Histogram(BOUNDS)
    for value in before:
        histogram.observe(value)
    since = histogram.counts()
    for value in after:
        histogram.observe(value)
    found = histogram.quantile(part, since)
    if not after:
        assert found is None
        return
    true = sorted(after)[math.ceil(part * len(after) - 1e-9) - 1]
    at = bisect_left(BOUNDS, true)
    low, high = (0.0, *BOUNDS)[at], (*BOUNDS, BOUNDS[-1])[at]
    assert found is not None and low <= found <= high


@pytest.mark.parametrize(
    ("values", "part", "expected"), [([1.5] * 4, 0.5, 1.5), ([0.5, 1.5], 1.0, 2.0), ([99.0], 0.5, 10.0)]
)
def test_values_are_even_within_a_bucket(values: list[float], part: float, expected: float) -> None:
    histogram = Histogram(BOUNDS)
    since = histogram.counts()
    for value in values:
        histogram.observe(value)
    assert histogram.quantile(part, since) == expected


@given(VALUES)
def test_plain_data_makes_it_again(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    made = Histogram.from_dict(histogram.to_dict())
    assert made.counts() == histogram.counts() and made.to_dict() == histogram.to_dict()
    made.observe(3.0)
    assert made.counts()[2] == histogram.counts()[2] + 1
