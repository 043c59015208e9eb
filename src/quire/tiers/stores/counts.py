"""Counts: what happened to one opened store, by name, for any number of threads."""

from __future__ import annotations

from collections import Counter
from threading import Lock


class Counts(Counter[str]):
    """Read it like a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def add(self, name: str, count: int = 1) -> None:
        """So many more."""
        with self._lock:
            self[name] += count
