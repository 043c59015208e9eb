"""Occupancy: the contents of a replay's pool over time, in a bounded number of samples."""

from __future__ import annotations

from dataclasses import dataclass

from quire.cache import KVCache
from quire.scheduler.scheduler import Scheduler

_MOST_SAMPLES = 512


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The pool from `time` until the next sample: the shares of its pages that running requests hold, and that are only
    cached; the rest is free. `running` requests run. `ended`: requests had ended, and no step was launched."""

    time: float
    held: float
    cached: float
    running: int
    ended: bool = False


class OccupancyLog:
    """Samples of one cache: at every n-th step, after it when requests end, and when the last one ends. If there are
    too many, every other step is dropped and n doubles."""

    def __init__(self, cache: KVCache, scheduler: Scheduler) -> None:
        self.samples: list[Occupancy] = []
        self._cache = cache
        self._scheduler = scheduler
        self._every = 1
        self._steps = 0

    def launched(self, now: float) -> None:
        """A step was launched."""
        self._steps += 1
        if self._steps % self._every:
            return
        if len(self.samples) >= _MOST_SAMPLES:
            self._thin()
        self._sample(now, ended=False)

    def ended(self, now: float) -> None:
        """Requests have ended and released their pages."""
        if self._adds(self._scheduler.num_running):
            self._sample(now, ended=True)

    def _adds(self, running: int) -> bool:
        """Whether a sample after an end differs from the last one; their number is bounded by that of the steps."""
        last = self.samples[-1] if self.samples else None
        return last is not None and (not last.ended or (last.running > 0 and running == 0))

    def _thin(self) -> None:
        before, self.samples = self.samples, []
        self._every *= 2
        steps = 0
        for sample in before:
            steps += not sample.ended
            if self._adds(sample.running) if sample.ended else steps % 2:
                self.samples.append(sample)

    def _sample(self, now: float, *, ended: bool) -> None:
        cache = self._cache
        total, cached = cache.plan.num_pages, cache.tree.num_evictable
        free = [group.num_free for group in cache.groups if group.reach.whole]
        available = cached + (min(free) if cache.pages.num_pages > total and free else cache.pages.num_free_pages)
        held = (total - available) / total
        self.samples.append(Occupancy(now, held, cached / total, self._scheduler.num_running, ended))
