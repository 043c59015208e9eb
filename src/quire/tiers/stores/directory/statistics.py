"""Statistics: what one opened store has done."""

from __future__ import annotations

from collections import Counter
from threading import Lock

COUNTED = (
    "hits",
    "misses",
    "stored",
    "evicted",
    "retries",  # answers, not calls
    "lost",  # records that the medium no longer held
    "overtaken",  # records whose place went to another one while they were being read
    "reclaimed",  # records that a writer which died had not completed
    "read_bytes",
    "written_bytes",
)


class Statistics:
    """Counters since the store was opened, of this process alone. Bytes are those of records."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        """Count some more."""
        assert counts.keys() <= set(COUNTED)
        with self._lock:
            self._counts.update(counts)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def as_dict(self) -> dict[str, int]:
        """All of them, zeros too."""
        with self._lock:
            return {name: self._counts[name] for name in COUNTED}
