"""Uses: when records were last used, kept in memory until it is worth a transaction.

Of what is used together, the first counts as used last: batches come in the order of prompts, and a page is of no use
without those before it, so a chain has to be forgotten from its end.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
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

    def now(self, count: int) -> range:
        """The next times, for the records of a batch: the first is the latest."""
        with self._lock:
            start = max(self._last + 1, time.time_ns() // 1000)
            self._last = start + count - 1
            return range(start, start + count)[::-1]

    def note(self, ids: Sequence[int], times: Sequence[int]) -> None:
        """These records were used at these times. Of one that is there twice the first time counts."""
        with self._lock:
            self._used.update(zip(reversed(ids), reversed(times), strict=True))

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
