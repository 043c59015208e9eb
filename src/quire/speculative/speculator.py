"""Speculator: drafts for the next step, and what came of those of the last one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from quire.cache.running import Lengths, RunningBatch
from quire.counters import counter, gauge
from quire.errors import UnsupportedModel
from quire.plan.budget import MemoryPlan
from quire.scheduler.step import Step
from quire.spec.ids import Ids
from quire.spec.layers import INDEXER_GROUP
from quire.spec.speculation import SpeculativeConfig
from quire.speculative.drafter import Drafter, Drafting, Drafts
from quire.speculative.governor import Governor, GovernorCounters
from quire.speculative.ngram import NgramDrafter
from quire.speculative.verify import Accepted, accepted_draws


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


class Speculator:
    """Asks a drafter for as many tokens as pay, and counts. Drafts are at most `most` tokens ahead.

    Without a governor each request gets as many drafts as there is room for.
    """

    def __init__(self, drafter: Drafter, governor: Governor | None, most: int) -> None:
        self.drafter = drafter
        self._governor = governor
        self._totals = DraftCounters()
        self._num_drawing = self._num_drawn = 0  # works that drew, and the tokens they got
        self._per_position: Lengths = np.zeros(most, dtype=np.int64)
        self._began = 0.0  # when the search for drafts of the next step began, by `time.perf_counter`
        self._searched_s = 0.0

    def rests(self, num_requests: int) -> bool:
        """Whether the next step, of so many requests, is made without `propose`."""
        self._searched_s = 0.0
        if self._governor is not None and self._governor.rests(num_requests):
            return True
        self._began = time.perf_counter()
        return False

    def propose(self, batch: RunningBatch, tokens: Ids, known: Lengths, room: Lengths) -> Drafts | None:
        """Tokens that may follow the first `known[i]` of each request, at most `room[i]`; None if none would pay.
        `rests` was asked before."""
        governor, most = self._governor, room
        if governor is not None:
            most = np.minimum(room, governor.limits(batch.rows, batch.serials))
        drafts = None
        if np.count_nonzero(most):
            drafts = self.drafter.propose(Drafting(batch, tokens, known, most))
            none_pays = governor is not None and not governor.pays(batch.rows, batch.serials, drafts.counts)
            if not drafts.num_tokens or none_pays:
                drafts = None
        self._searched_s = time.perf_counter() - self._began
        return drafts

    def accepted(self, step: Step, drawn: Lengths) -> Accepted:
        """`accepted_draws` of a step with drafts or prompts, counted."""
        batch, draw_counts = step.batch, step.draw_counts
        found = accepted_draws(step.tokens, step.draws, draw_counts, drawn, step.parents)
        self._num_drawing += int(np.count_nonzero(found.kept))
        self._num_drawn += int(found.kept.sum())
        at = (draw_counts > 1).nonzero()[0]
        if len(at):
            drafts, right, most = draw_counts[at] - 1, found.kept[at] - 1, len(self._per_position)
            self._totals.drafts += len(at)
            self._totals.draft_tokens += int(drafts.sum())
            self._totals.accepted_tokens += int(right.sum())
            depths = np.bincount(right, minlength=most + 1)
            self._per_position += len(at) - depths.cumsum()[:most]
            if self._governor is not None:
                self._governor.settled(batch.rows[at], batch.serials[at], np.minimum(drafts, most), right)
        return found

    def drew(self, num_requests: int) -> None:
        """A step drew a token for each of so many requests."""
        self._num_drawing += num_requests
        self._num_drawn += num_requests

    def measured(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """A step of so many requests, all of which decode, took this time, its drafting included."""
        if self._governor is not None:
            self._governor.measured(num_requests, num_drafts, seconds, self._searched_s)

    def counters(self) -> DraftCounters:
        """Counters and gauges now, with those of the governor."""
        return replace(
            self._totals,
            accepted_tokens_per_position=self._per_position.tolist(),
            tokens_per_step=self._num_drawn / max(1, self._num_drawing),
            **vars(self._governor.counters()) if self._governor is not None else {},
        )


def speculator_of(
    config: SpeculativeConfig | None, plan: MemoryPlan, drafter: Drafter | None = None
) -> Speculator | None:
    """What an engine with this configuration and plan drafts with: `drafter`, by default n-grams; None if it drafts
    nothing."""
    if config is None:
        return None
    if config.branches:
        _refuse_trees(plan)
    if drafter is None:
        drafter = NgramDrafter(plan.max_requests, config, shares=config.shared_history)
    width = (config.num_draft_tokens - 1) / config.num_steps if config.branches else 1.0
    return Speculator(drafter, Governor(plan.max_requests, config.num_steps, width), config.num_steps)


def _refuse_trees(plan: MemoryPlan) -> None:
    """Raise UnsupportedModel if drafts that branch cannot be verified on these groups."""
    for group in plan.groups:
        entries = {field.per for field in group.layout.fields}
        if group.reach.kind not in ("full", "window") or entries != {1} or group.name == INDEXER_GROUP:
            raise UnsupportedModel(
                f"drafts that branch cannot be verified on the group '{group.name}' of this model.",
                fix="leave topk out: drafts are a chain then.",
            )
