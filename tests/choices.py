"""Where the stateful checks get their choices from: a seed (fast, any length) or hypothesis (it shrinks a failure)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices:
    """Draws numbers from one source."""

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below
        """A number from 0 to `n - 1`."""

    @classmethod
    def seeded(cls, seed: int) -> Choices:
        source = random.Random(seed)
        return cls(lambda n: int(source.random() * n))

    @classmethod
    def drawn(cls, data: Any) -> Choices:
        """From hypothesis' `st.data()`."""
        return cls(lambda n: data.draw(st.integers(0, n - 1)))

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def one_of(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent
