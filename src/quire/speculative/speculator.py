"""Speculator: drafts for the next step, and what came of those of the last one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from quire.cache.running import Lengths, Rows, RunningBatch
from quire.errors import UnsupportedModel
from quire.plan.budget import MemoryPlan
from quire.spec.ids import Ids
from quire.spec.layers import INDEXER_GROUP
from quire.spec.speculation import SpeculativeConfig
from quire.speculative.drafter import Drafter, Drafting, Drafts
from quire.speculative.governor import Governor
from quire.speculative.ngram import NgramDrafter
from quire.speculative.verify import Accepted, accepted_draws

_FRUITLESS, _LESS_OFTEN = 32, 4
"""After so many steps in a row for which nothing was proposed, a drafter is asked before every so many steps only."""


class Speculator:
    """Asks a drafter for as many tokens as pay, and counts. Drafts are at most `most` tokens ahead.

    Without a governor each request gets as many drafts as there is room for.
    """

    def __init__(self, drafter: Drafter, governor: Governor | None, most: int) -> None:
        self.drafter = drafter
        self._governor = governor
        self._counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
        self._num_drawing = self._num_drawn = 0  # works that drew, and the tokens they got
        self._per_position: Lengths = np.zeros(most, dtype=np.int64)
        self._took_s = 0.0  # to draft for the step that is made now
        self._num_fruitless = 0  # times in a row that nothing was proposed

    def propose(self, batch: RunningBatch, tokens: Ids, known: Lengths, room: Lengths) -> Drafts | None:
        """Tokens that may follow the first `known[i]` of each request, at most `room[i]`; None if none would pay."""
        began = time.perf_counter()
        most = room if self._governor is None else np.minimum(room, self._governor.limits(batch.rows, batch.serials))
        drafts = None
        if np.count_nonzero(most):
            if self._num_fruitless < _FRUITLESS or self._num_fruitless % _LESS_OFTEN == 0:
                drafts = self.drafter.propose(Drafting(batch, tokens, known, most))
            self._num_fruitless = 0 if drafts is not None and drafts.num_tokens else self._num_fruitless + 1
        self._took_s = time.perf_counter() - began
        return drafts

    def accepted(
        self,
        batch: RunningBatch,
        tokens: Lengths,
        draws: Rows,
        draw_counts: Lengths,
        drawn: Lengths,
        parents: Ids | None = None,
    ) -> Accepted:
        """`accepted_draws` of a step, counted."""
        found = accepted_draws(tokens, draws, draw_counts, drawn, parents)
        self._num_drawing += int(np.count_nonzero(found.kept))
        self._num_drawn += int(found.kept.sum())
        at = (draw_counts > 1).nonzero()[0]
        if len(at):
            drafts, right, most = draw_counts[at] - 1, found.kept[at] - 1, len(self._per_position)
            self._counts["drafts"] += len(at)
            self._counts["draft_tokens"] += int(drafts.sum())
            self._counts["accepted_tokens"] += int(right.sum())
            depths = np.bincount(right, minlength=most + 1)
            self._per_position += len(at) - depths.cumsum()[:most]
            if self._governor is not None:
                self._governor.settled(batch.rows[at], batch.serials[at], np.minimum(drafts, most), right)
        return found

    def measured(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """A step of so many requests, all of which decode, took this time."""
        if self._governor is not None:
            self._governor.measured(num_requests, num_drafts, seconds + (self._took_s if num_drafts else 0.0))

    def statistics(self) -> dict[str, Any]:
        """Counters: requests times steps with drafts, drafts, those accepted, and those by their place. With the mean
        tokens of a request in a step that draws any, and what `Governor.statistics` says."""
        found: dict[str, Any] = {
            **self._counts,
            "accepted_tokens_per_position": self._per_position.tolist(),
            "tokens_per_step": self._num_drawn / max(1, self._num_drawing),
        }
        if self._governor is not None:
            found |= self._governor.statistics()
        return found


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
    return Speculator(drafter, Governor(plan.max_requests, config.num_steps), config.num_steps)


def _refuse_trees(plan: MemoryPlan) -> None:
    """Raise UnsupportedModel if drafts that branch cannot be verified on these groups."""
    for group in plan.groups:
        entries = {field.per for field in group.layout.fields}
        if group.reach.kind not in ("full", "window") or entries != {1} or group.name == INDEXER_GROUP:
            raise UnsupportedModel(
                f"drafts that branch cannot be verified on the group '{group.name}' of this model.",
                fix="leave topk out: drafts are a chain then.",
            )
