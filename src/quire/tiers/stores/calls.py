"""Calls and Counts of one opened store, for any thread."""

from __future__ import annotations

from collections import Counter
from threading import Condition, Lock


class Calls:
    """Calls in flight. Each is a `with` block, whose value says whether it may continue."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._in_flight = 0
        self.are_open = True

    def __enter__(self) -> bool:
        """False after `close`; else the store is not closed before the block ends."""
        with self._changed:
            self._in_flight += 1
            return self.are_open

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    def close(self) -> bool:
        """Refuse new calls, and wait for those in flight. False: it was closed before."""
        with self._changed:
            were_open, self.are_open = self.are_open, False
            self._changed.wait_for(lambda: self._in_flight == 0)
        return were_open


class Counts(Counter[str]):
    """Events by name: a Counter whose `add` is atomic."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def add(self, *names: str, **counts: int) -> None:
        """Add 1 to each of `names`, and add numbers by name."""
        with self._lock:
            self.update(names)
            self.update(counts)
