"""Speculator: drafts for the next step, and what came of those of the last one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from quire.cache.running import Lengths, Rows, RunningBatch
from quire.plan.budget import MemoryPlan
from quire.spec.ids import Ids
from quire.spec.speculation import SpeculativeConfig
from quire.speculative.drafter import Drafter, Drafting, Drafts
from quire.speculative.governor import Governor
from quire.speculative.ngram import NgramDrafter
from quire.speculative.verify import accepted_draws


class Speculator:
    """Asks a drafter for as many tokens as pay, and counts. `most` is the largest number of drafts of a request.

    Without a governor each request gets as many drafts as there is room for.
    """

    def __init__(self, drafter: Drafter, governor: Governor | None, most: int) -> None:
        self.drafter = drafter
        self._governor = governor
        self._counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
        self._num_drawing = self._num_drawn = 0  # works that drew, and the tokens they got
        self._per_position: Lengths = np.zeros(most, dtype=np.int64)
        self._took_s = 0.0  # to draft for the step that is made now

    def propose(self, batch: RunningBatch, tokens: Ids, known: Lengths, room: Lengths) -> Drafts | None:
        """Tokens that may follow the first `known[i]` of each request, at most `room[i]`; None if none would pay."""
        began = time.perf_counter()
        most = room if self._governor is None else np.minimum(room, self._governor.limits(batch.rows, batch.serials))
        drafts = self.drafter.propose(Drafting(batch, tokens, known, most)) if np.count_nonzero(most) else None
        self._took_s = time.perf_counter() - began
        return drafts

    def accepted(
        self, batch: RunningBatch, tokens: Lengths, draws: Rows, draw_counts: Lengths, drawn: Lengths
    ) -> Lengths:
        """`accepted_draws` of a step, counted."""
        kept = accepted_draws(tokens, draws, draw_counts, drawn)
        self._num_drawing += int(np.count_nonzero(kept))
        self._num_drawn += int(kept.sum())
        at = (draw_counts > 1).nonzero()[0]
        if len(at):
            drafts, right = draw_counts[at] - 1, kept[at] - 1
            self._counts["drafts"] += len(at)
            self._counts["draft_tokens"] += int(drafts.sum())
            self._counts["accepted_tokens"] += int(right.sum())
            depths = np.bincount(right, minlength=len(self._per_position) + 1)
            self._per_position += len(at) - depths.cumsum()[: len(self._per_position)]
            if self._governor is not None:
                self._governor.settled(batch.rows[at], batch.serials[at], drafts, right)
        return kept

    def measured(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """A step of so many requests, all of which decode, took this time."""
        if self._governor is not None:
            self._governor.measured(num_requests, num_drafts, seconds + self._took_s)

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


def speculator_of(config: SpeculativeConfig | None, plan: MemoryPlan) -> Speculator | None:
    """What an engine with this configuration and plan drafts with; None if it drafts nothing."""
    if config is None:
        return None
    most = plan.tokens_per_step - 1
    drafter = NgramDrafter(plan.max_requests, shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max)
    return Speculator(drafter, Governor(plan.max_requests, most), most)
