"""Rows of whole steps: samples of what `quire_step.Steps` and `vllm_step.Steps` do, alike for both.

Needs numpy and nothing else, because it also runs in the interpreters of peers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from bench.bookkeeping.workloads import Sizes
from bench.peers.metadata_worker import Operation, Sample

_WARM = 3
"""Steps before the timed ones, because another process has just used the processor's caches."""


class TimedSteps(Protocol):
    """An engine in which a number of requests run."""

    running: int
    parts: Sequence[str]
    """What the parts of a step are called."""

    def ready(self, steps: int) -> None:
        """Have room for so many steps in which everybody decodes."""

    def step(self) -> Sequence[int]:
        """One step; CPU nanoseconds of each of its parts."""


class Steps(TimedSteps, Protocol):
    """One whose requests all decode."""

    own_calls: int
    """Functions that `step` calls by itself, and `step`: they are not counted."""


def sample_of(taken: Iterable[Sequence[int]], names: Sequence[str], wall: float, **found: Any) -> Sample:
    """The mean of these steps, their extremes, and of each part the median and the extremes. Microseconds."""
    parts = np.array(list(taken), dtype=np.float64) / 1e3
    whole = parts.sum(axis=1)
    return {
        "cpu": float(whole.mean()),
        "wall": wall * 1e6 / len(whole),
        "least": float(whole.min()),
        "most": float(whole.max()),
        "parts": {
            name: [float(np.median(column)), float(column.min()), float(column.max())]
            for name, column in zip(names, parts.T, strict=True)
        },
        **found,
    }


def timed_steps(steps: TimedSteps, sizes: Sizes) -> Operation:
    """So many steps as requests reach new pages on average, fewer where many run. The figure is of one step."""
    count = steps_of(steps, sizes)
    steps.ready(count)
    yield {}
    while True:
        steps.ready(count + _WARM)
        for _ in range(_WARM):
            steps.step()
        began = time.perf_counter()
        taken = [steps.step() for _ in range(count)]
        yield sample_of(taken, steps.parts, time.perf_counter() - began, running=steps.running)


def counted_calls(steps: Steps, sizes: Sizes) -> Operation:
    """Calls of Python functions in a step: the figure is a number. Those of functions in C are told beside it."""
    count = min(16, steps_of(steps, sizes))
    steps.ready(count)
    yield {}
    while True:
        steps.ready(count)
        python, others = calls_of(steps, count)
        yield {"cpu": python, "wall": python, "c_calls": others, "running": steps.running}


def steps_of(steps: TimedSteps, sizes: Sizes) -> int:
    """Steps of one sample."""
    return max(4, min(sizes.steps, 16_384 // steps.running))


def calls_of(steps: Steps, count: int) -> tuple[float, float]:
    """Calls per step of Python functions, and of functions in C, the average of so many steps."""
    counts = {"call": 0, "c_call": 0}

    def note(_frame: Any, event: str, _argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    for _ in range(count):
        sys.setprofile(note)
        try:
            steps.step()
        finally:
            sys.setprofile(None)
    return counts["call"] / count - steps.own_calls, counts["c_call"] / count
