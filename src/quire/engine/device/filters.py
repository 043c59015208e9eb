"""Filters: top-k, top-p and min-p of many rows, each as the smallest probability that a row keeps.

Shares of probability are integers, so that a sum does not depend on its order: sorted candidates on a CPU and bins of
all tokens on a device keep the same tokens. Rows are filtered some at a time, which bounds the memory.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.cache.running import Rows
from quire.plan.devices import rows_at_once
from quire.scheduler.step import Terms
from quire.upload import to_device

_MOST_CANDIDATES = 1024  # a row whose filters may keep more of them is looked at as a whole
_UNITS = 2**52
"""Units of a probability of 1: sums of a row are exact as float64 too."""
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""Lowest bit and number of bits of the digits of a key, the highest first."""


class Filters:
    """Top-k, top-p and min-p of the rows that have any; `rows` are their indices among those that are drawn."""

    def __init__(self, terms: Terms, rows: Rows, device: torch.device) -> None:
        some = terms[rows]
        top_k = np.where(some["top_k"] > 0, some["top_k"], np.iinfo(np.int64).max)
        self._rows = to_device(rows, device)
        self._top_k, self._top_p, self._min_p = (
            to_device(array.copy(), device) for array in (top_k, some["top_p"], some["min_p"])
        )
        wide = (top_k > _MOST_CANDIDATES) & ((some["top_k"] > 0) | (some["top_p"] < 1.0))
        self._wide_at: Rows = wide.nonzero()[0]
        self._wide = to_device(self._wide_at, device)  # rows that may keep more than the candidates
        self._limits = bool((wide & (some["top_k"] > 0)).any())  # some of these have a top-k

    @classmethod
    def of(cls, terms: Terms, device: torch.device) -> Filters | None:
        """The filters of these requests; None if there are none."""
        rows = ((terms["top_k"] > 0) | (terms["top_p"] < 1.0) | (terms["min_p"] > 0.0)).nonzero()[0]
        return cls(terms, rows, device) if len(rows) else None

    def apply(self, scores: Tensor) -> None:
        """Exclude tokens: their scaled logits, float32 `[rows, vocabulary]`, become minus infinity."""
        step = rows_at_once(scores.shape[1])
        for first in range(0, len(self._rows), step):
            block = slice(first, min(first + step, len(self._rows)))
            rows = self._rows[block]
            some = scores[rows]
            probabilities = torch.softmax(some, dim=-1, dtype=torch.float64)
            least = self._least_kept(some, probabilities, block)
            scores[rows] = some.masked_fill_(probabilities < least[:, None], float("-inf"))

    def _least_kept(self, scores: Tensor, probabilities: Tensor, block: slice) -> Tensor:
        """Per row, the smallest probability that passes top-k, then top-p of what that kept, then min-p. Equals stay.

        It is a threshold, so that neither the order of equals nor the other rows matter.
        """
        vocabulary, top_p = probabilities.shape[-1], self._top_p[block]
        top_k = self._top_k[block].clamp(max=vocabulary)
        likeliest = probabilities.topk(min(vocabulary, _MOST_CANDIDATES), dim=-1).values
        unbounded = (top_k == vocabulary) & (top_p >= 1.0)
        least = _prefix_end(likeliest, top_k, top_p, vocabulary)
        first, stop = np.searchsorted(self._wide_at, (block.start, block.stop)).tolist()
        if first < stop:
            enough = shares_of(likeliest).sum(-1) >= top_p * _UNITS
            few = (top_k <= likeliest.shape[-1]) | ((top_k == vocabulary) & enough) | unbounded
            wide = self._wide[first:stop] - block.start
            self._look_at_all(scores, probabilities, (top_k, top_p), few, wide, least)
        least = torch.where(unbounded, 0.0, least)
        return torch.maximum(least, self._min_p[block] * likeliest[:, 0])

    def _look_at_all(
        self,
        scores: Tensor,
        probabilities: Tensor,
        terms: tuple[Tensor, Tensor],
        few: Tensor,
        wide: Tensor,
        least: Tensor,
    ) -> None:
        """Replace `least` of rows that are not `few`, whose candidates may not be enough. On a CPU these are sorted,
        if there are any; elsewhere to ask would wait for the device, and all that may need it are counted in bins."""
        top_k, top_p = terms
        if few.device.type == "cpu":
            rows = (~few).nonzero()[:, 0]
            if len(rows):
                whole = probabilities[rows].sort(-1, descending=True).values
                least[rows] = _prefix_end(whole, top_k[rows], top_p[rows], whole.shape[-1])
            return
        found = least_of_all(scores[wide], probabilities[wide], top_k[wide], top_p[wide], limits=self._limits)
        least[wide] = torch.where(few[wide], least[wide], found)


def shares_of(probabilities: Tensor) -> Tensor:
    """Probabilities, float64, in units, int64."""
    return (probabilities * _UNITS).round().long()


def _prefix_end(descending: Tensor, top_k: Tensor, top_p: Tensor, vocabulary: int) -> Tensor:
    """The last of the leading values of each row that top-k and top-p keep: at least one value is kept.

    Top-p is a share of what top-k kept; without top-k, of 1. The columns may be the most likely of more.
    """
    shares = shares_of(descending)
    kept = torch.arange(descending.shape[-1], device=descending.device)[None, :] < top_k[:, None]
    total = torch.where(top_k < vocabulary, (shares * kept).sum(-1), _UNITS)
    kept &= (shares.cumsum(-1) - shares) < (top_p * total)[:, None]
    return descending.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0))[:, 0]


def least_of_all(scores: Tensor, probabilities: Tensor, top_k: Tensor, top_p: Tensor, *, limits: bool) -> Tensor:
    """What `_prefix_end` finds in a whole sorted row, by counting: `scores` float32 and `probabilities` float64 `[n,
    vocabulary]`, in one order. `limits` says that a row has a top-k. Nothing is sorted, and no size depends on values.
    """
    bits = scores.view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31  # in the order of scores
    shares, vocabulary = shares_of(probabilities), scores.shape[1]
    total, least = torch.full_like(top_k, _UNITS), torch.zeros_like(top_k)
    if limits:
        least, before = _weighed(keys, torch.ones_like(shares), top_k)
        above = keys > least[:, None]
        one = torch.where(keys == least[:, None], shares, 0).amax(-1)
        total = torch.where(top_k < vocabulary, torch.where(above, shares, 0).sum(-1) + (top_k - before) * one, total)
    most = torch.ceil(top_p * total).long().clamp(min=1)
    least = torch.maximum(least, _weighed(keys, shares, most)[0])
    return torch.where(keys >= least[:, None], probabilities, torch.inf).amin(-1)


def _weighed(keys: Tensor, weights: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the smallest number whose larger `keys`, int64 below 2**32, weigh less than `most`, and what these
    weigh. Its digits are found one by one, by the weights of bins."""
    found, before = torch.zeros_like(most), torch.zeros_like(most)
    for shift, width in _DIGITS:
        mine = torch.where((keys >> (shift + width)) == found[:, None], weights, 0)
        bins = mine.new_zeros(len(keys), 2**width).scatter_add_(1, (keys >> shift) & (2**width - 1), mine)
        larger = bins.flip(-1).cumsum(-1).flip(-1) - bins + before[:, None]
        digit = (larger >= most[:, None]).sum(-1)
        before = larger.gather(1, digit[:, None])[:, 0]
        found = (found << width) | digit
    return found, before
