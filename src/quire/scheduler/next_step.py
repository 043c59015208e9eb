"""NextStep: the works of the step that a scheduler is making."""

from __future__ import annotations

import numpy as np

from quire.cache.running import Lengths
from quire.scheduler.request import Request
from quire.scheduler.step import StepRows


class NextStep:
    """Works of the step that is being made, which have room: decodes with their drafts, if any, then others with their
    counts."""

    def __init__(self) -> None:
        self.decodes: StepRows | None = None
        self.others: list[Request] = []
        self.begun: list[Request] = []
        self.num_tokens = 0
        self._drafts: Lengths | None = None
        self._counts: list[int] = []

    def add_decodes(self, decodes: StepRows, drafts: Lengths | None) -> None:
        """Requests that continue by one token each, and by their drafts."""
        self.decodes, self._drafts = decodes, drafts
        self.num_tokens = len(decodes) + (int(drafts.sum()) if drafts is not None else 0)

    def add(self, requests: list[Request], counts: list[int]) -> None:
        """Other requests, with the tokens that the step computes of each."""
        self.others += requests
        self._counts += counts
        self.num_tokens += sum(counts)

    def drop(self, request: Request) -> None:
        """The step has no room any more."""
        if self.decodes is not None and request in self.decodes.requests:
            others = np.array([at for at, r in enumerate(self.decodes.requests) if r is not request], dtype=np.intp)
            drafts = self._drafts[others] if self._drafts is not None else None
            self.add_decodes(self.decodes.part(others), drafts)
            self.num_tokens += sum(self._counts)
        if request in self.others:
            at = self.others.index(request)
            del self.others[at]
            self.num_tokens -= self._counts.pop(at)

    def counts(self) -> Lengths | None:
        """Tokens of each work; None if each has one and decodes."""
        if self.decodes is None:
            return np.array(self._counts, dtype=np.int64)
        if not self._counts and self._drafts is None:
            return None
        own = self.decodes.ones if self._drafts is None else 1 + self._drafts
        return np.concatenate((own, np.array(self._counts, dtype=np.int64)))
