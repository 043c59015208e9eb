"""Histogram: how many values were at most each bound. One observation costs a search among the bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """Counts of values by their bucket, and their sum."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def to_dict(self) -> dict[str, Any]:
        """`at_most` has pairs: a bound, and how many values are at most that."""
        at_most = list(zip(self._bounds, accumulate(self._counts[:-1]), strict=True))
        return {"count": sum(self._counts), "sum": self._sum, "at_most": at_most}
