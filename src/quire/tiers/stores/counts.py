"""Counts: events of one opened store by name, for any thread."""

from __future__ import annotations

from collections import Counter
from threading import Lock


class Counts(Counter[str]):
    """A Counter whose `add` is atomic."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def add(self, *names: str, **counts: int) -> None:
        """Add 1 to each of `names`, and numbers by name."""
        with self._lock:
            for name in names:
                self[name] += 1
            for name, count in counts.items():
                self[name] += count
