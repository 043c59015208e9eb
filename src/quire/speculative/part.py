"""Speculation: drafts before each step, and what is kept of them after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from quire.cache.running import Lengths, Rows
from quire.counters import Section
from quire.errors import InvalidInput
from quire.loop import End, Loop, Part, StepResult
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import StepRows
from quire.spec.events import Namespace
from quire.speculative.drafter import Drafts
from quire.speculative.speculator import Speculator

logger = logging.getLogger(__name__)

Move = Callable[[Any, Rows, Rows], None]
"""Copies what a launched step has written from flat places to others: accepted drafts of a tree."""


class Revision(Protocol):
    """What changes drafts before they are computed."""

    @property
    def is_used(self) -> bool:
        """Whether any request needs it now."""

    def revise(self, batch: StepRows, room: Lengths, drafts: Drafts | None) -> Drafts | None:
        """The drafts of these requests, at most `room[i]` tokens ahead; None for none."""


class Speculation(Part):
    """Drafts of one scheduler's requests. `move` belongs to the device."""

    def __init__(
        self, speculator: Speculator, scheduler: Scheduler, move: Move, revision: Revision | None = None
    ) -> None:
        self.speculator = speculator
        self._scheduler = scheduler
        self._move = move
        self._revision = revision
        self._overlaps = False
        self._began = 0.0

    def attach(self, loop: Loop) -> None:
        self._overlaps = loop.overlaps

    def before_schedule(self) -> None:
        """Propose the next tokens of running requests, which the next step computes too."""
        self._began = time.perf_counter()
        rests = self.speculator.rests(self._scheduler.num_running)
        revision = self._revision if self._revision is not None and self._revision.is_used else None
        if rests and revision is None:
            return
        batch, tokens, known, room = self._scheduler.drafting()
        try:
            proposes = not rests and np.count_nonzero(room)
            drafts = self.speculator.propose(batch, tokens, known, room) if proposes else None
            if revision is not None:
                drafts = revision.revise(batch, room, drafts)
        except (AssertionError, InvalidInput):
            raise
        except Exception:  # a device out of memory, say: the step goes on without drafts
            logger.exception("no drafts: proposing them failed")
            return
        if drafts is not None:
            self._scheduler.draft(batch, drafts.counts, drafts.tokens, drafts.parents)

    def settling(self, result: StepResult) -> None:
        """Say which draws are tokens of their requests. What was written for these is moved to its place."""
        step = result.step
        if step.is_decode:
            self.speculator.drew(len(step))
            return
        found = self.speculator.accepted(step, result.tokens)
        if len(found.sources):
            self._move(result.launched, found.sources, found.targets)
        result.kept, result.order = found.kept, found.order

    def settled(self, result: StepResult) -> None:
        step, launched = result.step, result.launched
        if not self._overlaps and not launched.waits and not step.computes_prompts:
            num_drafts = step.num_tokens - len(step)
            self.speculator.measured(len(step), num_drafts, time.perf_counter() - self._began)

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        """Later requests may get drafts from one that has all its tokens."""
        if end is End.FINISHED and request.is_remembered:
            self.speculator.drafter.ended(request.namespace, request.tokens, request.num_cached)

    def flush(self, namespace: Namespace | None) -> None:
        self.speculator.drafter.clear(namespace)
        for request in self._scheduler.requests:
            request.is_remembered = request.is_remembered and namespace not in (None, request.namespace)

    def counters(self) -> list[Section]:
        return [("speculation", self.speculator.counters())]
