"""Lookups: whether records exist, asked in the background in one batch per step. Never waits for a store.

    of(request, key)   None until the answer is there; the answer stays until the request ends
    flush()            ask for all keys that are new since the last one
    miss(request, ..)  records that could not be loaded: without it vLLM would load them again, for ever

A batch that is late at its deadline counts as missed. While one is late, so does every key that is new: a store that
hangs costs one request its deadline, and no more until the store answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from quire.connectors.vllm.workers import Workers

Found = dict[bytes, bool | None]


class _Batch(NamedTuple):
    end: float
    asked: list[tuple[Found, bytes]]
    answered: list[bool]  # empty until it is


class Lookups:
    """Of one tier. All methods are for the scheduler's thread; `exists` is called on another."""

    def __init__(self, exists: Callable[[Sequence[bytes]], Sequence[bool]], deadline_s: float) -> None:
        self._exists, self._deadline_s = exists, deadline_s
        self._of: dict[str, Found] = {}
        self._new: list[tuple[Found, bytes]] = []
        self._batches: deque[_Batch] = deque()
        self._workers = Workers("quire-lookup", 1)
        self.is_late = False
        self.expired = 0

    def of(self, request: str, key: bytes) -> bool | None:
        """Whether the record is there; None: not known yet."""
        found = self._of.get(request)
        if found is None:
            found = self._of[request] = {}
        if key in found:
            return found[key]
        if self.is_late:
            self.expired += 1
            found[key] = False
            return False
        found[key] = None
        self._new.append((found, key))
        return None

    def flush(self) -> None:
        """Once per step, after its lookups."""
        while self._batches and self._batches[0].answered:
            self._batches.popleft()
        now = time.monotonic()
        self.is_late = bool(self._batches) and self._batches[0].end < now
        if self.is_late:
            for batch in self._batches:
                self._expire(batch.asked)
            self._expire(self._new)
            self._new = []
        if self._new:
            batch = _Batch(now + self._deadline_s, self._new, [])
            self._new = []
            self._batches.append(batch)
            self._workers.run(lambda: self._ask(batch))

    def miss(self, request: str, keys: Iterable[bytes]) -> None:
        """The records are not there for this request."""
        found = self._of.get(request)
        if found is not None:
            found.update(dict.fromkeys(keys, False))

    def end(self, request: str) -> None:
        """The request asks no more."""
        self._of.pop(request, None)

    def close(self, timeout_s: float) -> None:
        """End the thread, if the store lets it go."""
        self._workers.close(timeout_s)

    def _expire(self, asked: list[tuple[Found, bytes]]) -> None:
        for found, key in asked:
            if found[key] is None:
                found[key] = False
                self.expired += 1

    def _ask(self, batch: _Batch) -> None:
        """On the other thread. Setting a key that is in a dict is atomic."""
        answers: dict[bytes, bool] = {}
        try:
            keys = list({key: None for _, key in batch.asked})
            answers = dict(zip(keys, self._exists(keys), strict=True))
        finally:
            for found, key in batch.asked:
                if found[key] is None:
                    found[key] = answers.get(key, False)
            batch.answered.append(True)
