"""Choices: random numbers for checks, from a seed (fast) or from a property-based tester."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Draws numbers from one source: `below(n)` gives one from 0 to `n - 1`."""

    __slots__ = ("below",)

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below

    @classmethod
    def seeded(cls, seed: int) -> Choices:
        """Numbers that follow from the seed, on every machine alike."""
        draw = random.Random(seed).random
        return cls(lambda n: int(draw() * n))

    def between(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def one_of(self, items: Sequence[T]) -> T:
        """One of these, each with the same probability."""
        return items[self.below(len(items))]

    def chance(self, percent: int) -> bool:
        """True with this probability."""
        return self.below(100) < percent

    def some_of(self, items: Sequence[T]) -> list[T]:
        """At least one of these, in random order; nothing if there are none."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(self.between(1, len(left)))] if left else []
