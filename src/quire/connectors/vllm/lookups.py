"""Lookups: whether records exist, asked in the background in one batch per step. Never waits for a store.

    of(request, key)    None until the answer is there; the answer stays until the request ends
    flush()             ask for the keys that are new since the last call
    loaded(request, ..) what loading gave; without it the engine would load a record that is bad again, forever

The keys of a batch that is late are not found, and so are all new ones until the store answers (`Threads.hang`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from quire.connectors.job import Job
from quire.tiers.store import Answer

Found = dict[bytes, Answer | None]


class Lookups:
    """The lookups of one tier, for the scheduler's thread. `num_missed` counts keys that were not there."""

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
        return None if found[key] is None else found[key] is Answer.HIT

    def flush(self) -> None:
        """Call it once per step, after its lookups."""
        if self._new:
            self._asked.append((self._submit(list(self._new)), self._new))
            self._new = {}
        self._asked = [asked for asked in self._asked if not self._end(*asked)]

    def loaded(self, request: str, answers: Mapping[bytes, Answer]) -> None:
        """Loading the records gave these answers."""
        if request in self._of:
            self._of[request].update(answers)

    def end(self, request: str) -> tuple[float, Mapping[bytes, Answer | None]]:
        """The request asks no more. Returns the time of its first lookup, and its keys with their answers, in the order
        in which it asked. RETRY: the store did not say in time."""
        return self._since.pop(request, 0.0), self._of.pop(request, {})

    def _end(self, job: Job, asked: Mapping[bytes, Sequence[Found]]) -> bool:
        answers = job.poll()
        for (key, requests), answer in zip(asked.items(), answers or (), strict=False):
            for found in requests:
                found[key] = answer
            self.num_missed += len(requests) if answer is Answer.MISS else 0
        return answers is not None
