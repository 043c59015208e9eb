"""Speculator: drafts before each step, and what is kept of them after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from quire.cache.running import Lengths, Rows
from quire.counters import Section, counter, gauge
from quire.errors import InvalidInput, UnsupportedModel
from quire.loop import End, Loop, Part, StepResult
from quire.plan.budget import MemoryPlan
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Step, StepRows
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.layers import INDEXER_GROUP
from quire.spec.speculation import SpeculativeConfig
from quire.speculative.drafter import Drafter, Drafting, Drafts
from quire.speculative.governor import Governor, GovernorCounters
from quire.speculative.ngram import NgramDrafter, SearchOf
from quire.speculative.verify import Accepted, accepted_draws

logger = logging.getLogger(__name__)

Move = Callable[[Any, Rows, Rows], None]
"""Copies what a launched step has written from flat places to others: accepted drafts of a tree."""


@dataclass(kw_only=True)
class DraftCounters(GovernorCounters):
    """What came of drafts. `drafts` counts requests times steps."""

    drafts: int = counter(
        "Times that a request computed drafts in a step.", name="spec_decode_num_drafts", vllm="spec_decode_num_drafts"
    )
    draft_tokens: int = counter(
        "Drafts that were computed.", name="spec_decode_num_draft_tokens", vllm="spec_decode_num_draft_tokens"
    )
    accepted_tokens: int = counter(
        "Of these, drafts that were accepted.",
        name="spec_decode_num_accepted_tokens",
        vllm="spec_decode_num_accepted_tokens",
    )
    accepted_tokens_per_position: list[int] = counter(
        "Drafts that were accepted, by their place after the last known token, from 0.",
        "position",
        start=list,
        name="spec_decode_num_accepted_tokens_per_pos",
        vllm="spec_decode_num_accepted_tokens_per_pos",
    )
    tokens_per_step: float = gauge("Mean tokens of a request in a step that draws any, since the start.")


class Revision(Protocol):
    """What changes drafts before they are computed."""

    @property
    def is_used(self) -> bool:
        """Whether any request needs it now."""

    def revise(self, batch: StepRows, room: Lengths, drafts: Drafts | None) -> Drafts | None:
        """The drafts of these requests, at most `room[i]` tokens ahead; None for none."""


class Speculator(Part):
    """Drafts of one scheduler's requests: before each step as many as pay, and after it what is kept of them.

    Drafts are at most `most` tokens ahead. Without a governor each request gets as many as there is room for. `move`
    belongs to the device.
    """

    def __init__(
        self,
        drafter: Drafter,
        governor: Governor | None,
        most: int,
        scheduler: Scheduler,
        move: Move,
        revision: Revision | None = None,
    ) -> None:
        self.drafter = drafter
        self._governor = governor
        self._scheduler = scheduler
        self._move = move
        self._revision = revision
        self._overlaps = False
        self._totals = DraftCounters()
        self._num_drawing = self._num_drawn = 0  # works that drew, and the tokens they got
        self._depths: Lengths = np.zeros(most + 1, dtype=np.int64)  # works by how many of their drafts were right
        self._began = 0.0  # when the turn began, by `time.perf_counter`
        self._searched_s = 0.0  # what a search for drafts took in this turn

    def attach(self, loop: Loop) -> None:
        self._overlaps = loop.overlaps

    def before_schedule(self) -> None:
        """Propose the next tokens of running requests, which the next step computes too."""
        self._began, self._searched_s = time.perf_counter(), 0.0
        rests = self._governor is not None and self._governor.rests(self._scheduler.num_running)
        revision = self._revision if self._revision is not None and self._revision.is_used else None
        if rests and revision is None:
            return
        batch, tokens, known, room = self._scheduler.drafting()
        try:
            proposes = not rests and np.count_nonzero(room)
            drafts = self._propose(batch, tokens, known, room) if proposes else None
            if revision is not None:
                drafts = revision.revise(batch, room, drafts)
        except (AssertionError, InvalidInput):
            raise
        except Exception:  # a device out of memory, say: the step goes on without drafts
            logger.exception("no drafts: proposing them failed")
            return
        if drafts is not None:
            self._scheduler.draft(batch, drafts.counts, drafts.tokens, drafts.parents)

    def _propose(self, batch: StepRows, tokens: Ids, known: Lengths, room: Lengths) -> Drafts | None:
        """Tokens that may follow the first `known[i]` of each request, at most `room[i]`; None if none would pay."""
        governor, most, drafts = self._governor, room, None
        if governor is not None:
            most = np.minimum(room, governor.limits(batch.rows, batch.serials))
        if np.count_nonzero(most):
            drafts = self.drafter.propose(Drafting(batch, tokens, known, most))
            none_pays = governor is not None and not governor.pays(batch.rows, batch.serials, drafts.counts)
            if not drafts.num_tokens or none_pays:
                drafts = None
        self._searched_s = time.perf_counter() - self._began
        return drafts

    def settling(self, result: StepResult) -> None:
        """Say which draws are tokens of their requests. What was written for these is moved to its place."""
        step = result.step
        if step.is_decode:
            self._num_drawing += len(step)
            self._num_drawn += len(step)
            return
        found = self.accepted(step, result.tokens)
        if len(found.sources):
            self._move(result.launched, found.sources, found.targets)
        result.kept, result.order = found.kept, found.order

    def accepted(self, step: Step, drawn: Lengths) -> Accepted:
        """`accepted_draws` of a step with drafts or prompts, counted."""
        batch, draw_counts = step.batch, step.draw_counts
        found = accepted_draws(step.tokens, step.draws, draw_counts, drawn, step.parents)
        self._num_drawing += int(np.count_nonzero(found.kept))
        self._num_drawn += int(found.kept.sum())
        at = (draw_counts > 1).nonzero()[0]
        if len(at):
            drafts, right, most = draw_counts[at] - 1, found.kept[at] - 1, len(self._depths) - 1
            self._totals.drafts += len(at)
            self._totals.draft_tokens += int(drafts.sum())
            self._totals.accepted_tokens += int(right.sum())
            self._depths += np.bincount(right, minlength=most + 1)
            if self._governor is not None:
                self._governor.settled(batch.rows[at], batch.serials[at], np.minimum(drafts, most), right)
        return found

    def settled(self, result: StepResult) -> None:
        step, governor = result.step, self._governor
        if governor is None or self._overlaps or result.launched.waits or step.computes_prompts:
            return
        num_drafts, seconds = step.num_tokens - len(step), time.perf_counter() - self._began
        governor.measured(len(step), num_drafts, seconds, self._searched_s)

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        """Later requests may get drafts from one that has all its tokens."""
        if end is End.FINISHED and request.is_remembered:
            self.drafter.ended(request.namespace, request.tokens, request.num_cached)

    def flush(self, namespace: Namespace | None) -> None:
        self.drafter.clear(namespace)
        for request in self._scheduler.requests:
            request.is_remembered = request.is_remembered and namespace not in (None, request.namespace)

    def counted(self) -> DraftCounters:
        """Counters and gauges now, with those of the governor."""
        return replace(
            self._totals,
            accepted_tokens_per_position=(self._depths.sum() - self._depths.cumsum())[:-1].tolist(),
            tokens_per_step=self._num_drawn / max(1, self._num_drawing),
            **vars(self._governor.counters()) if self._governor is not None else {},
        )

    def counters(self) -> list[Section]:
        return [("speculation", self.counted())]


def speculator_of(
    config: SpeculativeConfig | None,
    plan: MemoryPlan,
    drafter: Drafter | None,
    scheduler: Scheduler,
    move: Move,
    revision: Revision,
    search_of: SearchOf,
) -> Iterator[Speculator]:
    """The part of an engine with this configuration and plan, which drafts by `drafter`, by default n-grams with that
    search; none without speculation."""
    if config is None:
        return
    if config.branches:
        _refuse_trees(plan)
    if drafter is None:
        drafter = NgramDrafter(plan.max_requests, config, shares=config.shared_history, search_of=search_of)
    width = (config.num_draft_tokens - 1) / config.num_steps if config.branches else 1.0
    governor = Governor(plan.max_requests, config.num_steps, width)
    yield Speculator(drafter, governor, config.num_steps, scheduler, move, revision)


def _refuse_trees(plan: MemoryPlan) -> None:
    """Raise UnsupportedModel if drafts that branch cannot be verified on these groups."""
    for group in plan.groups:
        entries = {field.per for field in group.layout.fields}
        if group.reach.kind not in ("full", "window") or entries != {1} or group.name == INDEXER_GROUP:
            raise UnsupportedModel(
                f"drafts that branch cannot be verified on the group '{group.name}' of this model.",
                fix="leave topk out: drafts are a chain then.",
            )
