"""Lookups: whether records exist, asked in the background in one batch per step. Never waits for a store.

    of(request, key)    None until the answer is there; the answer stays until the request ends
    flush()             ask for the keys that are new since the last call
    miss(request, ...)  records that could not be loaded; otherwise the engine would load them again, forever

The keys of a batch that is late count as missing. While a batch is late, so do all new keys: a store that hangs costs
its deadline once, and nothing more until it answers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

logger = logging.getLogger(__name__)

Found = dict[bytes, bool | None]


class _Asked(NamedTuple):
    expires_at: float
    asked: list[tuple[Found, bytes]]
    ended: list[bool]  # empty until it has


class Lookups:
    """The lookups of one tier. All methods are for the scheduler's thread; `exists` is called on another.

    `counts`: `misses`, and `expired`, which are misses too. `are_late`: the store hangs."""

    def __init__(self, exists: Callable[[Sequence[bytes]], Sequence[bool]], deadline_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._exists, self._deadline_s = exists, deadline_s
        self._of: dict[str, Found] = {}
        self._since: dict[str, float] = {}
        self._new: list[tuple[Found, bytes]] = []
        self._batches: deque[_Asked] = deque()
        self.are_late = False
        self._queue: SimpleQueue[_Asked | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="quire-lookup", daemon=True)
        self._thread.start()

    def of(self, request: str, key: bytes) -> bool | None:
        """Whether the record is there; None if it is not known yet."""
        found = self._of.get(request)
        if found is None:
            found = self._of[request] = {}
            self._since[request] = time.time()
        if key in found:
            return found[key]
        found[key] = None
        self._new.append((found, key))
        if self.are_late:
            self._expire([(found, key)])
            return False
        return None

    def flush(self) -> None:
        """Call it once per step, after its lookups."""
        while self._batches and self._batches[0].ended:
            for found, key in self._batches.popleft().asked:
                self.counts["misses"] += not found[key]
        now = time.monotonic()
        self.are_late = bool(self._batches) and self._batches[0].expires_at < now
        if self.are_late:
            self._expire([*(pair for batch in self._batches for pair in batch.asked), *self._new])
            last = self._batches.pop()  # when it ends, all have
            self._batches = deque([last._replace(expires_at=0.0, asked=[])])
        elif self._new:
            batch = _Asked(now + self._deadline_s, self._new, [])
            self._batches.append(batch)
            self._queue.put(batch)
        self._new = []

    def miss(self, request: str, keys: Iterable[bytes]) -> None:
        """The records are not there for this request."""
        found = self._of.get(request)
        if found is not None:
            found.update(dict.fromkeys(keys, False))

    def end(self, request: str) -> tuple[float, Mapping[bytes, bool | None]]:
        """The request asks no more. Returns the time of its first lookup, and its keys with their answers, in the order
        in which it asked."""
        return self._since.pop(request, 0.0), self._of.pop(request, {})

    def close(self, timeout_s: float) -> None:
        """End the thread, unless the store hangs."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _expire(self, asked: Sequence[tuple[Found, bytes]]) -> None:
        for found, key in asked:
            if found[key] is None:
                found[key] = False
                self.counts["expired"] += 1

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            keys = list({key: None for _, key in batch.asked})
            answers: Mapping[bytes, bool] = {}
            try:
                answers = dict(zip(keys, self._exists(keys), strict=True))
            except Exception:
                logger.exception("a lookup failed, and its keys are missing")
            for found, key in batch.asked:
                if found[key] is None:  # an answer that comes late does not change what was said
                    found[key] = answers.get(key, False)
            batch.ended.append(True)
