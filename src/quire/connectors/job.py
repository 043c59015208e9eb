"""Job: a call of a store on another thread. It is given up when the store hangs, and then uses no payload any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from queue import SimpleQueue
from threading import Condition, Thread

import numpy as np

from quire.tiers.store import Answer, Counts, RecordViews

_LEAST_REST_S, _MOST_REST_S = 0.5, 30.0
_LARGE = 256 << 10  # copies of so many bytes let other threads run


class Job:
    """A job ends when its call returns, or when the store has done nothing for `deadline_s`. Then keys without an
    answer have RETRY, and the payloads are the engine's: what arrives later is dropped."""

    def __init__(self, call: Callable[[Job], None], count: int, deadline_s: float = inf, counts: Counts | None = None):
        """`call` answers for `count` keys by `tell` and `fill`. It does not raise. `counts` counts what `expired`."""
        self._call: Callable[[Job], None] | None = call
        self._deadline_s, self._expires_at = deadline_s, time.monotonic() + deadline_s
        self._changed, self._counts = Condition(), counts
        self._has_ended = False
        self.answers = [Answer.RETRY] * count
        self.expired = False

    def run(self) -> Job:
        """Call it, unless it has expired."""
        call = self._call
        if call is not None:
            call(self)
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()
        return self

    def tell(self, answers: Mapping[int, Answer]) -> bool:
        """The store has done something, which takes it a deadline at most. False: the job has expired before."""
        with self._changed:
            if not self.expired:
                self._expires_at = time.monotonic() + self._deadline_s
                for at, answer in answers.items():
                    self.answers[at] = answer
            return not self.expired

    def fill(self, at: int, payload: RecordViews, content: memoryview) -> bool:
        """Copy the content of a hit to its payload. False: the job has expired before, and nothing was copied."""
        with self._changed:
            if not self.expired:
                start = 0
                for view in payload.views:
                    part = content[start : start + view.nbytes]
                    if view.nbytes < _LARGE:
                        view[:] = part
                    else:
                        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(part, np.uint8))
                    start += view.nbytes
            return self.tell({at: Answer.HIT})

    def poll(self) -> list[Answer] | None:
        """The answers, if it has ended. Does not wait."""
        if self._has_ended:  # also while its late thread has the lock
            return self.answers
        if not self._changed.acquire(blocking=False):
            return None
        try:
            if not self._has_ended and time.monotonic() >= self._expires_at:
                self.expired = self._has_ended = True
                self._call = None  # and what it refers to, while it is in a queue
                if self._counts is not None:
                    self._counts.add(expired=self.answers.count(Answer.RETRY))
            return self.answers if self._has_ended else None
        finally:
            self._changed.release()

    def wait(self) -> list[Answer]:
        """The answers, when `poll` has them."""
        with self._changed:
            while (answers := self.poll()) is None:
                self._changed.wait(max(0.0, self._expires_at - time.monotonic()))
            return answers


class Rest:
    """When a store may be asked again that answered nothing: after half a second, then longer each time."""

    def __init__(self) -> None:
        self._until, self._seconds = 0.0, _LEAST_REST_S

    @property
    def is_over(self) -> bool:
        """Whether it may be asked."""
        return time.monotonic() >= self._until

    def told(self, answers: Sequence[Answer]) -> None:
        """The store has given these answers."""
        if answers.count(Answer.RETRY) < len(answers):
            self._seconds = _LEAST_REST_S
        else:
            self._until = time.monotonic() + self._seconds
            self._seconds = min(2 * self._seconds, _MOST_REST_S)


class Threads:
    """Threads that run jobs in their order. They end with the process, also one that hangs in a store. `rest` is for
    what they ask of it."""

    def __init__(self, count: int, name: str) -> None:
        self.rest = Rest()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._running: list[Job | None] = [None] * count
        self._threads = [Thread(target=self._run, args=[at], name=f"{name}-{at}", daemon=True) for at in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def hang(self) -> bool:
        """Whether a thread is in a call whose job was given up: a store that hangs costs one deadline."""
        return any(job is not None and job.poll() is not None and job.expired for job in self._running)

    def add(self, job: Job) -> Job:
        """Run it when its turn comes."""
        self._jobs.put(job)
        return job

    def close(self, until: float) -> bool:
        """Run what waits, for as long as the store answers. False: a thread has not ended by then."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, at: int) -> None:
        while (job := self._jobs.get()) is not None:
            self._running[at] = job
            job.run()
            self._running[at] = job = None
