"""Watchdogs: what is stuck, for how long, and where. They end nothing: a person, or a supervisor, decides that.

Watchdog     a thread that watches another one, which calls `tick`
LaneWatch    lanes of a mover that have something in flight and finish nothing
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

L = TypeVar("L")

LANE_STUCK_AFTER_S = 30.0
_LOOKS = 4  # in the limit


class Watchdog:
    """Watches the thread that makes it, from another one, until `close`. After `limit_s` without a tick the log has
    once what that thread does. `longest_s` is the longest time between two ticks."""

    def __init__(self, name: str, limit_s: float) -> None:
        self.longest_s = 0.0
        self.num_stuck = 0
        self._name = name
        self._limit_s = limit_s
        self._watched = threading.get_ident()
        self._ticked_s = time.monotonic()
        self._is_told = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"quire-watchdog-{name}", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """The watched thread got here."""
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._ticked_s)
        self._ticked_s = now
        if self._is_told:
            self._is_told = False
            logger.warning("%s goes on", self._name)

    def stuck_s(self) -> float:
        """Seconds since the last tick if that is above the limit, else 0."""
        waited_s = time.monotonic() - self._ticked_s
        return waited_s if waited_s > self._limit_s else 0.0

    def close(self) -> None:
        """Watch no longer."""
        self._ends.set()

    def _watch(self) -> None:
        while not self._ends.wait(self._limit_s / _LOOKS):
            waited_s = self.stuck_s()
            if waited_s and not self._is_told:
                self._is_told = True
                self.num_stuck += 1
                frame = sys._current_frames().get(self._watched)
                where = "".join(traceback.format_stack(frame)) if frame is not None else "  (its thread has ended)\n"
                logger.warning("%s is stuck for %.1f s, in:\n%s", self._name, waited_s, where)


class LaneWatch(Generic[L]):
    """Looks at lanes now and then. `mark` of a lane is anything that changes when something moves on it, and None while
    nothing is in flight."""

    def __init__(
        self,
        lanes: Sequence[L],
        mark: Callable[[L], object | None],
        *,
        limit_s: float = LANE_STUCK_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mark = mark
        self._limit_s = limit_s
        self._clock = clock
        self._since: dict[L, tuple[object | None, float]] = dict.fromkeys(lanes, (None, 0.0))

    def stuck(self) -> dict[L, float]:
        """Lanes that have not moved for longer than the limit, and for how many seconds."""
        now, found = self._clock(), {}
        for lane, (before, since_s) in self._since.items():
            mark = self._mark(lane)
            if mark != before:
                self._since[lane] = (mark, now)
            elif mark is not None and now - since_s > self._limit_s:
                found[lane] = now - since_s
        return found
