"""Governor: how many drafts are worth their time, from what steps took and how often drafts were right.

A step with drafts takes longer than one without by `start + each * drafts`, as measured for each size of batch (powers
of two). A draft pays where its chance to be accepted is worth more than its own time:

    acceptance ** place  >  each / seconds per token without drafts

and a step computes drafts if they bring more together than it takes longer.

Measurements may mislead, and a search for drafts takes time even if it finds none. So each size of batch has a credit.
Every step adds a small share of its time to it, steps with drafts add what they gain or lose, and each search
subtracts its time. Without credit nothing is searched. So a load on which no draft pays loses that share and the first
credit, and no more; while drafts pay, there is always credit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from quire.cache.running import Lengths, Rows
from quire.counters import counter, gauge

_MEMORY = 0.9  # weight of a request's earlier acceptance, per step with drafts
_MEMORY_OF_ALL = 0.97
_FORGET = 0.95  # weight of all acceptance, per step whose drafts do not pay: untried ones become likely again
_PRIOR_TRIALS = 2.0
_PRIOR_RATE = 0.9  # so drafts that were not tried are tried where they could pay, as far as there is credit
_LEARN = 0.1  # share of a new measurement
_PLAIN_EVERY = 96  # steps with drafts between two without, of one size of batch
_MARGIN = 1.05  # how much more than its cost a draft has to be worth
_OUTLIER = 3.0
_FIRST = 4  # measurements of which the least is taken: first steps take longer
_SHARE = 0.005  # share of the time of steps for drafts that may not pay
_MOST_CREDIT = 24.0  # steps without drafts, for one request
_MOST_DEBT = 8.0  # such steps, which 1,600 steps regain
_LEAST_CREDIT = 2.0  # for any batch: more requests show earlier what pays


@dataclass(slots=True)
class _Size:
    """What was measured of batches of about one size."""

    plain_s: float = 0.0  # a step without drafts, per request
    num_plain: int = 0
    since_plain: int = 0
    num_drafted: int = 0
    drafts: float = 0.0  # mean number of a step with drafts
    added_s: float = 0.0  # mean of what they add to a step
    variance: float = 0.0  # variance of the number
    covariance: float = 0.0
    search_s: float = 0.0  # a search that ends without drafts
    num_searches: int = 0
    most_credit: float = _MOST_CREDIT
    credit: float = _MOST_CREDIT  # unit: steps without drafts

    def cost(self) -> tuple[float, float]:
        """Seconds that drafts add to a step, and each of them."""
        mean = self.added_s / self.drafts
        each = mean / 2 if self.variance < 0.1 else min(max(0.0, self.covariance / self.variance), mean)
        return self.added_s - each * self.drafts, each

    def add_plain(self, seconds: float) -> None:
        """A step without drafts took this time per request."""
        if 0 < self.num_plain < _FIRST:
            seconds = min(seconds, self.plain_s)
        elif self.num_plain:
            seconds = self.plain_s + _LEARN * (min(seconds, _OUTLIER * self.plain_s) - self.plain_s)
        self.plain_s, self.num_plain, self.since_plain = seconds, self.num_plain + 1, 0

    def add_search(self, seconds: float) -> float:
        """A search without drafts took this time. Returns what it costs: others may run on the processor meanwhile."""
        if self.num_searches < _FIRST:
            self.search_s = min(seconds, self.search_s) if self.num_searches else seconds
        else:
            self.search_s += _LEARN * (min(seconds, _OUTLIER * self.search_s) - self.search_s)
        self.num_searches += 1
        return min(seconds, _OUTLIER * self.search_s)

    def add_drafted(self, num_drafts: int, added_s: float) -> None:
        """So many drafts have added this time to a step."""
        if self.num_drafted < _FIRST:
            self.added_s = min(added_s, self.added_s) if self.num_drafted else added_s
            self.drafts = num_drafts
        else:
            more, longer = num_drafts - self.drafts, added_s - self.added_s
            self.drafts += _LEARN * more
            self.added_s += _LEARN * longer
            self.variance = (1 - _LEARN) * (self.variance + _LEARN * more * more)
            self.covariance = (1 - _LEARN) * (self.covariance + _LEARN * more * longer)
        self.num_drafted += 1


@dataclass(kw_only=True)
class GovernorCounters:
    """What a draft costs and brings, and whether that turns drafts off; None where nothing governs drafts."""

    PREFIX: ClassVar = "spec_decode_"
    draft_cost: float | None = gauge(
        "What a draft adds to a step, in tokens without drafts; 0 while it is not measured.", start=None
    )
    draft_brings: float | None = gauge("The chance of a draft to be accepted, if those before it are.", start=None)
    is_off: float | None = gauge("1 while no draft is made, because it costs more than it brings.", start=None)
    steps_without_drafts: int | None = counter("Steps without drafts, because none would have paid.", start=None)


class Governor:
    """See the module. `most` is the largest number of drafts of a request that follow each other, `width` how many
    are computed for each of these, and `num_rows` the cache's rows."""

    def __init__(self, num_rows: int, most: int, width: float = 1.0) -> None:
        self._most, self._width = most, width
        self._serials: Lengths = np.zeros(num_rows, dtype=np.int64)
        self._right: npt.NDArray[np.float64] = np.zeros(num_rows)
        self._trials: npt.NDArray[np.float64] = np.zeros(num_rows)
        self._all_right = self._all_trials = 0.0
        first = [max(_LEAST_CREDIT, _MOST_CREDIT * 2 ** (-bits / 2)) for bits in (0, *range(32))]
        self._sizes = [_Size(most_credit=credit, credit=credit) for credit in first]
        self._last = self._sizes[0]
        self._num_accepted = 0  # in the step that is not measured yet
        self._is_off = False
        self.num_plain = 0
        """Steps that computed no draft because none paid."""

    def rests(self, num_requests: int) -> bool:
        """Whether the next step, of so many requests, is made without searching drafts."""
        size = self._last = self._sizes[num_requests.bit_length()]
        self._is_off = size.credit < 0
        self.num_plain += self._is_off
        return self._is_off or size.num_plain < _FIRST or size.since_plain >= _PLAIN_EVERY

    def limits(self, rows: Rows, serials: Lengths) -> Lengths:
        """How many drafts each of these requests may have in the next step, int64."""
        if self.rests(len(rows)):
            return np.zeros(len(rows), dtype=np.int64)
        if self._last.num_drafted < _FIRST:
            return np.full(len(rows), self._most, dtype=np.int64)
        rates = self._rates(rows, serials)
        worth = min(1.0, _MARGIN * self._width * self._last.cost()[1] / self._last.plain_s)
        limits: Lengths = np.minimum(np.log(max(worth, 1e-9)) / np.log(rates), self._most).astype(np.int64)
        if not np.count_nonzero(limits):
            self._leave_out(rows)
        return limits

    def pays(self, rows: Rows, serials: Lengths, counts: Lengths) -> bool:
        """Whether the next step should compute `counts[i]` drafts of each of these requests."""
        size = self._last
        if size.num_drafted < _FIRST:
            return True
        start, each = size.cost()
        rates = self._rates(rows, serials)
        brings = (rates * (1 - rates ** np.minimum(counts, self._most)) / (1 - rates)).sum() * size.plain_s
        if brings < _MARGIN * (start + each * int(counts.sum())):
            self._leave_out(rows)
            return False
        return True

    def settled(self, rows: Rows, serials: Lengths, drafts: Lengths, accepted: Lengths) -> None:
        """Drafts of these requests were computed, and so many accepted."""
        self._meet(rows, serials)
        trials = np.minimum(accepted + 1, drafts)  # what is behind the first wrong one says nothing
        self._right[rows] = self._right[rows] * _MEMORY + accepted
        self._trials[rows] = self._trials[rows] * _MEMORY + trials
        fade = _MEMORY_OF_ALL ** min(len(rows), 8)
        right = int(accepted.sum())
        self._num_accepted += right
        self._all_right = self._all_right * fade + right / len(rows)
        self._all_trials = self._all_trials * fade + int(trials.sum()) / len(rows)

    def measured(self, num_requests: int, num_drafts: int, seconds: float, searched_s: float = 0.0) -> None:
        """A step of so many requests that decode, with so many drafts, took this time, with that to search drafts.
        `settled` was told before what was accepted."""
        size = self._sizes[num_requests.bit_length()]
        accepted, self._num_accepted = self._num_accepted, 0
        if not num_drafts:
            size.add_plain((seconds - searched_s) / num_requests)
            # A search that was interrupted is no verdict: none counts for more than a step.
            lost = min(size.add_search(searched_s), size.plain_s * num_requests) if searched_s else 0.0
        else:
            size.since_plain += 1
            if not size.num_plain:
                return
            added = max(0.0, seconds - size.plain_s * num_requests)
            lost = 0.0
            if size.num_drafted:  # the first step of a kind is no verdict
                start, each = size.cost()
                most = max(start + each * num_drafts, size.plain_s * num_requests / 16)
                added = min(added, _OUTLIER * most)
                lost = added - accepted * size.plain_s
            size.add_drafted(num_drafts, added)
        credit = size.credit + _SHARE - lost / (size.plain_s * num_requests)
        size.credit = min(max(credit, -min(size.most_credit, _MOST_DEBT)), size.most_credit)

    def _leave_out(self, rows: Rows) -> None:
        """The next step has no drafts of these requests, because they would not pay."""
        self.num_plain += 1
        self._is_off = True
        self._all_right, self._all_trials = _FORGET * self._all_right, _FORGET * self._all_trials
        self._right[rows] *= _FORGET
        self._trials[rows] *= _FORGET

    def _rate(self) -> float:
        """The chance of a draft to be right, where those before it were, over all requests."""
        return (self._all_right + _PRIOR_TRIALS * _PRIOR_RATE) / (self._all_trials + _PRIOR_TRIALS)

    def _rates(self, rows: Rows, serials: Lengths) -> npt.NDArray[np.float64]:
        """The rate of each request, above 0 and below 1."""
        self._meet(rows, serials)
        found: npt.NDArray[np.float64] = (self._right[rows] + _PRIOR_TRIALS * self._rate()) / (
            self._trials[rows] + _PRIOR_TRIALS
        )
        return found

    def _meet(self, rows: Rows, serials: Lengths) -> None:
        """Nothing is known of requests that are new in their rows."""
        fresh = self._serials[rows] != serials
        if np.count_nonzero(fresh):
            self._right[rows[fresh]] = self._trials[rows[fresh]] = 0.0
            self._serials[rows] = serials

    def counters(self) -> GovernorCounters:
        """Counters and gauges now. `draft_cost` is of batches as large as the last one."""
        size = self._last
        return GovernorCounters(
            draft_cost=size.added_s / size.drafts / size.plain_s if size.num_drafted else 0.0,
            draft_brings=self._rate(),
            is_off=float(self._is_off),
            steps_without_drafts=self.num_plain,
        )
