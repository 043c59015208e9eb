"""Sampler: from logits to tokens, for a whole batch at once.

A draw is a function of (seed, sequence index, position) and the logits alone: the uniform number behind it is a hash,
not a generator's state, and it is inverted in the order of the vocabulary whatever filters apply. So a request draws
the same tokens alone, in any batch, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.messages import TokenLogprobs
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams

_MOST_CANDIDATES = 1024  # a row whose filters may keep more of them is sorted whole
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens drawn for a batch, int64 `[rows]` on the device, and log-probabilities for the rows that asked."""

    tokens: Tensor
    logprobs: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]

    def row_logprobs(self, row: int) -> list[TokenLogprobs] | None:
        """What `TokenOutput.logprobs` reports for one row; waits for the device."""
        if row not in self.logprobs:
            return None
        chosen, rank, values, ids = self.logprobs[row]
        return [TokenLogprobs(float(chosen), int(rank), ids.tolist(), values.tolist())]


class Sampler:
    """Draws one token per row. `eos_token_ids` are what `min_tokens` holds back."""

    def __init__(self, eos_token_ids: Sequence[int], seed: int = 0) -> None:
        self._eos = list(eos_token_ids)
        self._seed = seed

    def draw(self, logits: Tensor, requests: Sequence[Request]) -> Drawn:
        """Draw the next token of `requests[i]` from row i of `logits`, float32 `[rows, vocabulary]`, overwritten."""
        logprobs = {i: logits[i].clone() for i, r in enumerate(requests) if r.params.logprobs is not None}
        for row, request in enumerate(requests):
            self._adjust(logits[row], request)
        tokens = logits.argmax(dim=-1)
        drawn = [i for i, request in enumerate(requests) if not request.params.greedy]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            chosen = self._draw_rows(logits[rows], [requests[i] for i in drawn])
            tokens[rows] = chosen
        return Drawn(tokens, {i: _logprobs(row, tokens[i], requests[i]) for i, row in logprobs.items()})

    def _adjust(self, row: Tensor, request: Request) -> None:
        """Penalties, bias and held-back tokens of one request, in place. Most requests have none."""
        params = request.params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
        if params.needs_history:
            _penalise(row, request)
        if _place(request) < params.min_tokens:
            row[list(request.stop_ids | set(self._eos))] = float("-inf")

    def _draw_rows(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        device = logits.device
        params = [request.params for request in requests]
        scale = torch.tensor([1.0 / p.temperature for p in params], dtype=logits.dtype, device=device)
        logits = logits * scale[:, None]
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float64)
        filtered = [row for row, p in enumerate(params) if _filters(p)]
        if filtered:
            rows = torch.tensor(filtered, device=device)
            some = probabilities[rows]
            least = _least_kept(some, [params[row] for row in filtered])
            probabilities[rows] = torch.where(some >= least[:, None], some, 0.0)
        return _invert(probabilities, torch.from_numpy(self._uniform(requests)).to(device))

    def _uniform(self, requests: Sequence[Request]) -> npt.NDArray[np.float64]:
        """One number in [0, 1) per request, hashed from its seed, index and position."""
        mask = 2**64 - 1
        seeds = [
            (r.params.seed if r.params.seed is not None else ~((self._seed << 32) + r.arrival)) & mask for r in requests
        ]
        where = [(r.index << 40) + _place(r) for r in requests]
        state = _mix(np.array(seeds, dtype=np.uint64))
        state = _mix(state ^ _mix(np.array(where, dtype=np.uint64)))
        return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _place(request: Request) -> int:
    """Index, among the request's outputs, of the token being drawn; the scheduler has counted it as pending."""
    return request.num_outputs + request.pending - 1


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's output function; wraps around on purpose."""
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _least_kept(probabilities: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Per row, the smallest probability that top-k, then top-p of what that kept, then min-p leave in. Equals stay.

    A threshold, so that neither the order of equals nor the other rows matter.
    """
    device, vocabulary = probabilities.device, probabilities.shape[-1]
    top_k = torch.tensor([min(p.top_k, vocabulary) if p.top_k > 0 else vocabulary for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
    likeliest = probabilities.topk(min(vocabulary, _MOST_CANDIDATES), dim=-1).values
    unbounded = (top_k == vocabulary) & (top_p >= 1.0)
    few = (top_k <= likeliest.shape[-1]) | ((top_k == vocabulary) & (likeliest.sum(-1) >= top_p)) | unbounded
    least = _prefix_end(likeliest, top_k, top_p)
    if not bool(few.all()):
        many = ~few
        least[many] = _prefix_end(probabilities[many].sort(-1, descending=True).values, top_k[many], top_p[many])
    least = torch.where(unbounded, 0.0, least)
    return torch.maximum(least, min_p * likeliest[:, 0])


def _prefix_end(descending: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The last of the leading values of each row that top-k and top-p keep: at least one, as many as their share takes.

    Top-p is a share of what top-k kept. The columns may be the likeliest of more: without top-k that share is of 1.
    """
    width = descending.shape[-1]
    kept = torch.arange(width, device=descending.device)[None, :] < top_k[:, None]
    total = torch.where(top_k <= width, (descending * kept).sum(-1), 1.0)
    kept &= (descending.cumsum(-1) - descending) < (top_p * total)[:, None]
    return descending.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0))[:, 0]


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index at which each row's cumulative weight passes its uniform share of the total, int64 `[rows]`."""
    cumulative = weights.cumsum(-1)
    found = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
    last = (weights > 0).long().cumsum(-1).argmax(-1)  # rounding may pass the last possible token
    return torch.minimum(found, last)


def _penalise(row: Tensor, request: Request) -> None:
    params = request.params
    if params.repetition_penalty != 1.0:
        ids = torch.from_numpy(np.unique(request.tokens)).long().to(row.device)
        seen = row[ids]
        row[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        unique, counts = np.unique(request.output_tokens, return_counts=True)
        ids = torch.from_numpy(unique).long().to(row.device)
        amount = params.presence_penalty + params.frequency_penalty * counts
        row[ids] -= torch.from_numpy(np.asarray(amount, dtype=np.float32)).to(row.device)


def _logprobs(row: Tensor, token: Tensor, request: Request) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probability of the token, its rank, the highest log-probabilities, their ids), before any adjustment."""
    values = torch.log_softmax(row, dim=-1)
    chosen = values[token]
    top, ids = values.topk(request.params.logprobs or 0)
    return chosen, (values > chosen).sum() + 1, top, ids
