"""Parameters of tests: all combinations where there is time, and else so few that every value occurs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def few(values: Collection[Any], most: int) -> list[Any]:
    """All values, those after the first `most` marked slow."""
    return [value if i < most else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]


def covering(most: int | None = None, /, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize by the product of these values. Combinations beyond a diagonal, in which every value occurs, are
    marked slow. Of the diagonal `most` are quick."""
    values = [list(axis) for axis in axes.values()]
    longest = max(map(len, values))
    diagonal = {tuple(k % len(axis) for axis in values) for k in range(longest if most is None else min(most, longest))}
    cases = [
        pytest.param(
            *(axis[i] for axis, i in zip(values, place, strict=True)),
            marks=() if place in diagonal else pytest.mark.slow,
        )
        for place in product(*(range(len(axis)) for axis in values))
    ]
    return pytest.mark.parametrize(tuple(axes), cases)
