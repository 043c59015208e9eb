"""Counts: what happened to one opened store, by name, for any number of threads."""

from __future__ import annotations

from collections import Counter
from threading import Lock


class Counts(Counter[str]):
    """Read it like a dictionary, in which what never happened is 0."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def add(self, *names: str, **counts: int) -> None:
        """One more of some, and so many more of others."""
        with self._lock:
            for name in names:
                self[name] += 1
            for name, count in counts.items():
                self[name] += count
