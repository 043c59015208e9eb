"""Governor: how many drafts are worth their time, from what steps took and how often drafts were right.

A draft pays where its chance to be accepted is worth more than the time that it adds to the step:

    acceptance ** place  >  seconds per draft / seconds per token without drafts

The left side is measured for each request, the right side for each size of batch (powers of two). Every so often a
step is made without drafts, or with them where they do not pay, so that both sides stay known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.cache.running import Lengths, Rows

_MEMORY = 0.9  # of a request's acceptance, per step with drafts
_PRIOR_TRIALS = 2.0
_LEARN = 0.1  # share of a new measurement
_PLAIN_EVERY = 48  # steps with drafts between two without, of one size of batch
_TRY_FIRST, _TRY_LAST = 64, 2048  # steps between two trials where drafts do not pay: each failure doubles it
_MARGIN = 1.05  # how much more than its cost a draft has to be worth
_OUTLIER = 3.0
_FIRST = 4  # measurements of which the least is taken: first steps take longer


@dataclass(slots=True)
class _Size:
    """What was measured of batches of about one size."""

    plain_s: float = 0.0  # a step without drafts, per request
    draft_s: float = -1.0  # what each draft adds; below 0: not measured
    num_plain: int = 0
    num_drafted: int = 0
    since_plain: int = 0
    since_trial: int = 0
    wait: int = _TRY_FIRST
    tried: bool = field(default=False)


class Governor:
    """See the module. `most` is the largest number of drafts of a request, `num_rows` the cache's rows."""

    def __init__(self, num_rows: int, most: int) -> None:
        self._most = most
        self._serials: Lengths = np.zeros(num_rows, dtype=np.int64)
        self._right: npt.NDArray[np.float64] = np.zeros(num_rows)
        self._trials: npt.NDArray[np.float64] = np.zeros(num_rows)
        self._all_right, self._all_trials = 1.0, 2.0
        self._sizes = [_Size() for _ in range(33)]
        self._last = self._sizes[0]
        self._is_off = False
        self.num_plain = 0
        """Steps that computed no draft because none paid."""

    def limits(self, rows: Rows, serials: Lengths) -> Lengths:
        """How many drafts each of these requests may have in the next step, int64."""
        size = self._last = self._sizes[len(rows).bit_length()]
        self._is_off = False
        if size.num_plain < _FIRST or size.since_plain >= _PLAIN_EVERY:
            return np.zeros(len(rows), dtype=np.int64)
        if size.num_drafted < _FIRST:
            return np.full(len(rows), self._most, dtype=np.int64)
        rates = self._rates(rows, serials)
        worth = min(1.0, _MARGIN * size.draft_s / size.plain_s)
        with np.errstate(divide="ignore"):
            most = np.log(max(worth, 1e-9)) / np.log(np.minimum(rates, 0.999))
        limits: Lengths = np.clip(np.floor(most), 0, self._most).astype(np.int64)
        if not limits.any():
            size.since_trial += 1
            if size.since_trial >= size.wait:
                size.since_trial, size.tried = 0, True
                limits[:] = max(1, self._most // 2)
            else:
                self.num_plain += 1
                self._is_off = True
        return limits

    def settled(self, rows: Rows, serials: Lengths, drafts: Lengths, accepted: Lengths) -> None:
        """Of these requests, so many drafts were computed and accepted."""
        self._rates(rows, serials)
        trials = np.minimum(accepted + 1, drafts)  # what is behind the first wrong one says nothing
        self._right[rows] = self._right[rows] * _MEMORY + accepted
        self._trials[rows] = self._trials[rows] * _MEMORY + trials
        fade = 0.99 ** min(len(rows), 8)
        self._all_right = self._all_right * fade + float(accepted.mean())
        self._all_trials = self._all_trials * fade + float(trials.mean())

    def measured(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """A step of so many requests that decode, with so many drafts, took this time, with that of its drafting."""
        size = self._sizes[num_requests.bit_length()]
        if not num_drafts:
            each = seconds / num_requests
            if 0 < size.num_plain < _FIRST:
                each = min(each, size.plain_s)
            elif size.num_plain:
                each = size.plain_s + _LEARN * (min(each, _OUTLIER * size.plain_s) - size.plain_s)
            size.plain_s, size.num_plain, size.since_plain = each, size.num_plain + 1, 0
            return
        size.since_plain += 1
        if not size.num_plain:
            return
        added = max(0.0, seconds - size.plain_s * num_requests) / num_drafts
        size.num_drafted += 1
        is_cheaper = size.tried and added < size.draft_s
        if size.num_drafted <= _FIRST:
            size.draft_s = added if size.draft_s < 0 else min(added, size.draft_s)
        else:
            learn = 0.5 if is_cheaper else _LEARN
            size.draft_s += learn * (min(added, _OUTLIER * max(size.draft_s, size.plain_s / 16)) - size.draft_s)
        if size.tried:
            size.tried = False
            size.wait = _TRY_FIRST if is_cheaper else min(2 * size.wait, _TRY_LAST)
        elif size.wait > _TRY_FIRST:
            size.wait = _TRY_FIRST

    def _rates(self, rows: Rows, serials: Lengths) -> npt.NDArray[np.float64]:
        """The chance of a draft of each request to be right, where those before it were."""
        fresh = rows[self._serials[rows] != serials]
        self._right[fresh] = self._trials[fresh] = 0.0
        self._serials[rows] = serials
        prior = self._all_right / self._all_trials
        found: npt.NDArray[np.float64] = (self._right[rows] + _PRIOR_TRIALS * prior) / (
            self._trials[rows] + _PRIOR_TRIALS
        )
        return found

    def statistics(self) -> dict[str, float]:
        """What a draft costs and brings, in tokens of a step without drafts, and whether that turns drafts off.

        `draft_cost` is of batches as large as the last one, 0 while it is not measured. `draft_brings` is the share of
        first drafts, and of those after right ones, that were right, over all requests.
        """
        is_known = self._last.draft_s >= 0 and self._last.plain_s > 0
        return {
            "draft_cost": self._last.draft_s / self._last.plain_s if is_known else 0.0,
            "draft_brings": self._all_right / self._all_trials,
            "is_off": float(self._is_off),
            "steps_without_drafts": self.num_plain,
        }
