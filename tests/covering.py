"""Parameters of tests: all combinations where there is time, and else so few that every value occurs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def covering(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize by the product of these values. Combinations beyond a diagonal, in which every value occurs, are
    marked slow."""
    values = [list(axis) for axis in axes.values()]
    diagonal = {tuple(k % len(axis) for axis in values) for k in range(max(map(len, values)))}
    cases = [
        pytest.param(
            *(axis[i] for axis, i in zip(values, place, strict=True)),
            marks=() if place in diagonal else pytest.mark.slow,
        )
        for place in product(*(range(len(axis)) for axis in values))
    ]
    return pytest.mark.parametrize(tuple(axes), cases)
