"""History: how full each pool was, the highest marks, and what held memory when it was short."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

EVERY_S = 1.0
_SAMPLES = 600
_COARSE_EVERY = 60  # samples
_COARSE = 1440
_SHORTAGES = 64

Occupancy = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Frames by tier, group and state."""


class History:
    """Samples of one engine: each second for ten minutes, and each minute of the last day. Between two samples only
    the marks are kept, which `mark` costs a comparison for each group. Times are in seconds since 1970."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic, clock: Callable[[], float] = time.time) -> None:
        self._seconds, self._clock = seconds, clock
        self._due_at = seconds() + EVERY_S
        self._count = 0
        self._fine: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self._coarse: deque[dict[str, Any]] = deque(maxlen=_COARSE)
        self._shortages: deque[dict[str, Any]] = deque(maxlen=_SHORTAGES)
        self._short_at = -EVERY_S
        self.marks: dict[tuple[str, str, str], int] = {}
        self._marked_at: dict[tuple[str, str, str], float] = {}
        self.num_shortages = 0

    @property
    def is_due(self) -> bool:
        """Whether `sample` should be called."""
        return self._seconds() >= self._due_at

    def mark(self, tier: str, group: str, state: str, frames: int) -> None:
        """A pool has so many frames in this state: the highest number stays."""
        key = (tier, group, state)
        if frames > self.marks.get(key, -1):
            self.marks[key] = frames
            self._marked_at[key] = self._clock()

    def sample(self, frames: Occupancy, requests: Mapping[str, int]) -> None:
        """How the pools are now, and how many `requests` run and wait."""
        self._due_at = self._seconds() + EVERY_S
        found = {
            "at": round(self._clock(), 3),
            "frames": {tier: {name: dict(each) for name, each in groups.items()} for tier, groups in frames.items()},
            "requests": dict(requests),
        }
        self._fine.append(found)
        if self._count % _COARSE_EVERY == 0:
            self._coarse.append(found)
        self._count += 1
        for tier, groups in frames.items():
            for group, states in groups.items():
                for state, count in states.items():
                    self.mark(tier, group, state, count)

    def short(self, why: str, holders: Callable[[], Mapping[str, Any]]) -> None:
        """Memory is short now. What holds it is recorded at most once in a second."""
        self.num_shortages += 1
        now = self._seconds()
        if now - self._short_at >= EVERY_S:
            self._short_at = now
            self._shortages.append({"at": round(self._clock(), 3), "why": why, **holders()})

    def to_dict(self) -> dict[str, Any]:
        """Everything, the oldest first."""
        return {
            "seconds": list(self._fine),
            "minutes": list(self._coarse),
            "highest": self.highest(),
            "shortages": list(self._shortages),
            "num_shortages": self.num_shortages,
        }

    def highest(self) -> list[dict[str, Any]]:
        """The marks, with the time of each."""
        return [
            {"tier": tier, "group": group, "state": state, "frames": frames, "at": round(self._marked_at[key], 3)}
            for key, frames in sorted(self.marks.items())
            for tier, group, state in [key]
        ]
