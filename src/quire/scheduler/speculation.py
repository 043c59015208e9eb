"""DraftRows: the drafts of running requests, by row. They follow the known tokens, and the next step computes them.

Without speculation no row ever has any, and a step costs one comparison.
"""

from __future__ import annotations

import numpy as np

from quire.cache.running import Lengths, Rows
from quire.scheduler.step import Step, StepRows
from quire.spec.ids import Ids
from quire.spec.speculation import SpeculativeConfig


class DraftRows:
    """Drafts by row: `counts[i]` tokens after the known ones of row i may be accepted. The tokens `flat` and the
    lengths `known`, `launched` and `pending` are views of those of `RunningRows`."""

    def __init__(
        self, flat: Ids, known: Lengths, launched: Lengths, pending: Lengths, config: SpeculativeConfig | None
    ) -> None:
        self._flat, self._known, self._launched, self._pending = flat, known, launched, pending
        self._config = config
        self.counts: Lengths = np.zeros(len(known), dtype=np.int64)
        self.num_drafted = 0  # rows that have any
        self._parents: Ids | None = None  # parents of drafts, by row; None: drafts are chains

    def room(self, batch: StepRows) -> Lengths:
        """How many tokens ahead drafts of each request may be in its next step, as far as the plan reserves room. 0
        while it waits for a token or has more than its last token to compute. No draft is beyond its limit."""
        if self._config is None:
            return np.zeros(len(batch), dtype=np.int64)
        rows = batch.rows
        known, pending = self._known[rows], self._pending[rows]
        room: Lengths = np.minimum(np.maximum(batch.limit - known - 1, 0), self._config.num_steps)
        busy = (pending > 0) | (known - self._launched[rows] != 1)
        if np.count_nonzero(busy):
            room[busy] = 0
        if self._config.branches:
            room[batch.most_pending == 0] = 0  # its draws depend on all tokens before, which branches do not share
        return room

    def write(self, batch: StepRows, counts: Lengths, tokens: Ids, parents: Ids | None = None) -> None:
        """The first `counts[i]` of `tokens[i]` may follow the last known token of request i, and its next step computes
        them. Draft j follows draft `parents[i, j]`, an earlier one, or the last known token if that is -1; without
        `parents` each follows the one before it."""
        rows = batch.rows
        ahead = np.arange(tokens.shape[1])
        places, own = (batch.base + self._known[rows])[:, None] + ahead, ahead < counts[:, None]
        self._flat[places[own]] = tokens[own]
        self.num_drafted += int(np.count_nonzero(counts) - np.count_nonzero(self.counts[rows]))
        self.counts[rows] = counts
        self._parents = None
        if parents is not None and parents.shape[1]:
            self._parents = np.full((len(self.counts), parents.shape[1]), -1, dtype=np.int32)
            self._parents[rows] = parents

    def tokens_of(self, batch: StepRows, most: int, *, shared: bool) -> Lengths | None:
        """Tokens of each of these requests that decode, the last known one and drafts; None if no row has any. If
        drafts are more than `most` in all, or half of that where it is `shared` with prompts, the last ones are
        dropped."""
        if not self.num_drafted:
            return None
        drafts, most = self.counts[batch.rows], most // 2 if shared else most
        if int(np.add.reduce(drafts)) <= most:
            return 1 + drafts
        kept: Lengths = np.clip(most - (np.cumsum(drafts) - drafts), 0, drafts)
        self.counts[batch.rows] = kept
        self.num_drafted -= int(np.count_nonzero(drafts) - np.count_nonzero(kept))
        return 1 + kept

    def remove(self, rows: Rows) -> None:
        """The drafts of these rows have been launched, or are dropped."""
        if self.num_drafted:
            self.num_drafted -= int(np.count_nonzero(self.counts[rows]))
            self.counts[rows] = 0

    def branch(self, step: Step, drafts: Lengths) -> None:
        """The last `drafts[i]` tokens of work i may be a tree: they get their parents and positions."""
        if self._parents is None or not self.num_drafted:
            return
        parents = self._parents[step.batch.rows]
        firsts = step.offsets[1:] - drafts  # flat places of the first draft of each work
        flat = np.arange(step.num_tokens, dtype=np.int32) - 1
        flat[step.offsets[:-1]] = -1
        positions, depths = step.positions.copy(), np.zeros(parents.shape, dtype=np.int64)
        for draft in range(parents.shape[1]):
            some = (drafts > draft).nonzero()[0]
            parent = parents[some, draft]
            depths[some, draft] = np.where(parent >= 0, depths[some, parent] + 1, 1)
            flat[firsts[some] + draft] = firsts[some] + parent  # the last known token is before the first draft
            positions[firsts[some] + draft] = step.positions[firsts[some] - 1] + depths[some, draft]
        if (positions != step.positions).any():
            step.parents, step.positions = flat, positions
