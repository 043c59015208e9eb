"""Lookups: whether records exist, asked in the background in one batch per step. Never waits for a store.

    of(request, key)    None until the answer is there; the answer stays until the request ends
    flush()             ask for the keys that are new since the last call
    miss(request, ...)  records that could not be loaded; otherwise the engine would load them again, forever

The keys of a batch that is late count as missing, and so do all new ones until the store answers (`Threads.hang`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.connectors.job import Job
from quire.tiers.store import Answer

Found = dict[bytes, bool | None]


class Lookups:
    """The lookups of one tier, for the scheduler's thread. `num_missed` counts keys that were not found."""

    def __init__(self, submit: Callable[[Sequence[bytes]], Job]) -> None:
        """`submit` asks the store whether keys exist."""
        self.num_missed = 0
        self._submit = submit
        self._of: dict[str, Found] = {}
        self._since: dict[str, float] = {}
        self._new: dict[bytes, list[Found]] = {}
        self._asked: list[tuple[Job, dict[bytes, list[Found]]]] = []

    def of(self, request: str, key: bytes) -> bool | None:
        """Whether the record is there; None if it is not known yet."""
        found = self._of.get(request)
        if found is None:
            found = self._of[request] = {}
            self._since[request] = time.time()
        if key not in found:
            found[key] = None
            self._new.setdefault(key, []).append(found)
        return found[key]

    def flush(self) -> None:
        """Call it once per step, after its lookups."""
        if self._new:
            self._asked.append((self._submit(list(self._new)), self._new))
            self._new = {}
        self._asked = [asked for asked in self._asked if not self._end(*asked)]

    def miss(self, request: str, keys: Iterable[bytes]) -> None:
        """The records are not there for this request."""
        if request in self._of:
            self._of[request].update(dict.fromkeys(keys, False))

    def end(self, request: str) -> tuple[float, Mapping[bytes, bool | None]]:
        """The request asks no more. Returns the time of its first lookup, and its keys with their answers, in the order
        in which it asked."""
        return self._since.pop(request, 0.0), self._of.pop(request, {})

    def _end(self, job: Job, asked: Mapping[bytes, Sequence[Found]]) -> bool:
        answers = job.poll()
        for (key, requests), answer in zip(asked.items(), answers or (), strict=False):
            for found in requests:
                found[key] = answer is Answer.HIT
            self.num_missed += 0 if answer is Answer.HIT else len(requests)
        return answers is not None
