"""Uses: when records were last used, kept in memory until it is worth a transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from threading import Lock

_EVERY_SECONDS = 5.0
_MOST = 50_000


class Uses:
    """Times in microseconds of the wall clock, which all processes share, by record id. Never the same one twice."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._used: dict[int, int] = {}
        self._last = 0
        self._flushed_at = time.monotonic()

    def now(self, count: int = 1) -> range:
        """The next `count` times."""
        with self._lock:
            start = max(self._last + 1, time.time_ns() // 1000)
            self._last = start + count - 1
            return range(start, start + count)

    def note(self, ids: Iterable[int]) -> None:
        """These records were used just now, in this order."""
        numbers = list(ids)
        times = self.now(len(numbers))
        with self._lock:
            self._used.update(zip(numbers, times, strict=True))

    def of(self, record: int, stored: int) -> int:
        """When a record was last used, as far as this process knows."""
        return max(stored, self._used.get(record, 0))

    @property
    def are_due(self) -> bool:
        """Whether other processes should hear of them."""
        waited = time.monotonic() - self._flushed_at
        return bool(self._used) and (waited > _EVERY_SECONDS or len(self._used) > _MOST)

    def flush(self, index: sqlite3.Connection) -> None:
        """Write them down, inside a transaction. If that is rolled back, what it knew is lost, and no more."""
        with self._lock:
            used, self._used = self._used, {}
            self._flushed_at = time.monotonic()
        index.executemany(
            "UPDATE records SET used = ? WHERE id = ? AND owner IS NULL AND used < ?",
            [(at, number, at) for number, at in used.items()],
        )
