"""SimulatedSizes: pools that get smaller and larger at times of the virtual clock, by the engine's own part."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from fractions import Fraction

from quire.cache import KVCache
from quire.errors import InvalidInput
from quire.loop.resizing import ResizingPart
from quire.plan.budget import MemoryPlan
from quire.sim.clock import VirtualClock

Sizes = Sequence[tuple[float, MemoryPlan]]
"""The plan that a cache gets from a time on, of its groups with no more frames, in order of time."""


class SimulatedSizes(ResizingPart):
    """The sizes of one replay. Each is asked for at the first step from its time on."""

    def __init__(self, cache: KVCache, sizes: Sizes, clock: VirtualClock) -> None:
        super().__init__(cache, seconds=lambda: clock.now)
        self._clock, self._left = clock, deque(sizes)

    def next_time(self) -> float | None:
        """When it goes on: that is not known. None if it has nothing to do."""
        return None if self.is_done else math.inf

    def before_schedule(self) -> None:
        while self._left and self._left[0][0] <= self._clock.now:
            self.aim(self._left.popleft()[1])
        super().before_schedule()


def parse_sizes(text: str) -> tuple[tuple[float, Fraction], ...]:
    """Times and parts of a pool, such as `60s:1/2,120s:1`. Raises InvalidInput."""
    found: list[tuple[float, Fraction]] = []
    for each in text.split(","):
        time, _, part = each.strip().partition(":")
        try:
            if re.fullmatch(r"\d+(\.\d+)?s?", time) is None or not 0 < Fraction(part) <= 1:
                raise ValueError(each)
        except (ValueError, ZeroDivisionError):
            raise InvalidInput(
                f"'{each}' is not a time and a part of the pool.", fix="write --resizes 60s:1/2,120s:1."
            ) from None
        found.append((float(time.removesuffix("s")), Fraction(part)))
    return tuple(sorted(found))
