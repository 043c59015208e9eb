"""Failures: what went wrong between a store and its server, counted by kind."""

from __future__ import annotations

from collections import Counter
from threading import Lock


class Failures(Counter[str]):
    """Counts by kind, for any number of threads. Read it like a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def note(self, kind: str) -> None:
        """One more."""
        with self._lock:
            self[kind] += 1
