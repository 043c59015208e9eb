"""Sampler: from logits to tokens, for a whole batch at once.

A draw is a function of (seed, sequence index, position) and the logits alone: the token with the highest sum of its
scaled logit and of Gumbel noise, which is hashed for each token and not a generator's state. So a request draws the
same tokens alone, in any batch, and after a preemption, and similar distributions mostly draw the same token.

Drafts that were drawn from known distributions may be verified by rejection sampling instead (`Proposal`): a draft with
probability q is drawn again with chance p / q, by another hashed number, and otherwise a token of what p exceeds q by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.cache.running import Lengths, Rows
from quire.engine.messages import TokenLogprobs
from quire.scheduler.request import Request
from quire.scheduler.step import TERMS, Places, Terms
from quire.spec.ids import Ids

_MOST_CANDIDATES = 1024  # a row whose filters may keep more of them is sorted as a whole
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # multipliers of a hash of 32 bits with little bias, as int32
_VERIFYING = np.uint64(1 << 39)  # added to the number of an output: other noise than that of its draw
_UNIT = float(np.float32(2.0**-31 * (1 - 2.0**-24)))  # brings 31 bits into [0, 1), also if they are rounded up


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for some draws of a step: `tokens[i]` for draw `draws[i]`, of a request that is not greedy. It was drawn
    from `probabilities[i]`, float32 `[drafts, vocabulary]`."""

    draws: Rows
    tokens: Lengths
    probabilities: Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens drawn for a batch, int64 `[rows]` on the device, and log-probabilities for rows that need them.

    `probabilities`, if the sampler keeps them, are the rows that are not greedy, and what each of these was drawn from,
    float32 `[rows, vocabulary]`.
    """

    tokens: Tensor
    logprobs: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]
    probabilities: tuple[Rows, Tensor] | None = None

    def row_logprobs(self, row: int) -> TokenLogprobs | None:
        """The content of `TokenOutput.logprobs` for one row; waits for the device."""
        if row not in self.logprobs:
            return None
        chosen, rank, values, ids = self.logprobs[row]
        return TokenLogprobs(float(chosen), int(rank), ids.tolist(), values.tolist())


class Sampler:
    """Draws one token at each place. `eos_token_ids` are suppressed by `min_tokens`. With `keeps_probabilities`, its
    draws may be proposed (`Proposal`). Without `reports_logprobs`, which drafts need not, no request gets any."""

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        seed: int = 0,
        *,
        keeps_probabilities: bool = False,
        reports_logprobs: bool = True,
    ) -> None:
        self._eos = list(eos_token_ids)
        self._seed = seed
        self._keeps = keeps_probabilities
        self._reports = reports_logprobs
        self._draws = _Draws(np.zeros(0, dtype=TERMS), seed, torch.device("cpu"))  # of the last step

    def draw(self, logits: Tensor, places: Places, proposal: Proposal | None = None) -> Drawn:
        """Draw a token at `places[i]` from row i of `logits`, float32 `[places, vocabulary]`, overwritten.

        A draft of `proposal` is drawn again where rejection sampling accepts it, and no other token equals it.
        """
        reported = self._draws_of(places, logits.device).logprobs if self._reports else ()
        logprobs = {i: logits[i].clone() for i in reported}
        scores, probabilities = self._score(logits, places, proposal)
        tokens = scores.argmax(dim=-1)
        found = {i: _logprobs(row, tokens[i], places.requests[i]) for i, row in logprobs.items()}
        return Drawn(tokens, found, probabilities)

    def scores(self, logits: Tensor, places: Places) -> Tensor:
        """Float32 `[places, vocabulary]`: the token with the highest score is the draw. As for `draw`."""
        return self._score(logits, places, None)[0]

    def _score(
        self, logits: Tensor, places: Places, proposal: Proposal | None
    ) -> tuple[Tensor, tuple[Rows, Tensor] | None]:
        draws, probabilities = self._draws_of(places, logits.device), None
        for row in draws.to_adjust(places.outputs):
            self._adjust(logits[row], places.requests[row], int(places.outputs[row]))
        if draws.rows is None:
            return logits, None
        scores = draws.scale(logits if draws.is_all else logits[draws.rows])
        if self._keeps:
            probabilities = draws.sampled, torch.softmax(scores, dim=-1)
        draws.add_noise(scores, places.outputs, proposal)
        if not draws.is_all:
            logits[draws.rows] = scores
            scores = logits
        return scores, probabilities

    def _draws_of(self, places: Places, device: torch.device) -> _Draws:
        if self._draws.terms is not places.terms:
            self._draws = _Draws(places.terms, self._seed, device)
        return self._draws

    def _adjust(self, row: Tensor, request: Request, place: int) -> None:
        """Penalties, bias and suppressed tokens of one request, in place. Most requests have none."""
        params = request.params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
        if params.needs_history:
            _penalise(row, request, request.tokens_before(place))
        if place < params.min_tokens:
            row[list(request.stop_ids | set(self._eos))] = float("-inf")


class _Draws:
    """The sampling terms of some requests, computed once for all steps that have the same requests.

    `sampled` are those that are not greedy; `rows` too, on the device, None if all are greedy.
    """

    def __init__(self, terms: Terms, seed: int, device: torch.device) -> None:
        self.terms = terms
        self.logprobs: list[int] = terms["logprobs"].nonzero()[0].tolist()
        self._adjusted: list[int] = terms["adjusts"].nonzero()[0].tolist()
        self._least = terms["least"].copy() if np.count_nonzero(terms["least"]) else None
        at = (~terms["greedy"]).nonzero()[0]
        self.rows = torch.from_numpy(at).to(device) if len(at) else None
        self.is_all = len(at) == len(terms)
        drawn = terms if self.is_all else terms[at]
        self.sampled: Rows = at
        self._scale = torch.from_numpy((1.0 / drawn["temperature"]).astype(np.float32)).to(device)[:, None]
        self._filtered = _Filters.of(drawn, device)
        own = ~((np.uint64(seed % 2**32) << np.uint64(32)) + drawn["arrival"])
        self._seeds = _mix(np.where(drawn["seeded"], drawn["seed"], own))
        self._indices = drawn["index"] << np.uint64(40)

    def to_adjust(self, outputs: Lengths) -> list[int]:
        """Rows whose logits are changed before the draw: always, or until so many tokens have been drawn."""
        if self._least is None:
            return self._adjusted
        held = (outputs < self._least).nonzero()[0].tolist()
        return sorted({*self._adjusted, *held})

    def scale(self, logits: Tensor) -> Tensor:
        """The logits that are drawn from, given those of `rows`: scaled, and -inf of tokens that filters exclude."""
        scores = logits * self._scale
        if self._filtered is not None:
            self._filtered.apply(scores)
        return scores

    def add_noise(self, scores: Tensor, outputs: Lengths, proposal: Proposal | None) -> None:
        """From now on the highest of each row is its draw."""
        where = self._indices + outputs[self.sampled].astype(np.uint64)
        at = None if proposal is None else np.searchsorted(self.sampled, proposal.draws)
        if at is not None:
            where[at] += _VERIFYING
        keys = _mix(self._seeds ^ _mix(where))
        if proposal is not None and at is not None:
            uniform = (_mix(keys[at]) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            rows = torch.from_numpy(at).to(scores.device)
            scores[rows] = _verified(torch.softmax(scores[rows], dim=-1), proposal, uniform).log_()
        scores.sub_(_noise(keys, scores))


def _verified(target: Tensor, proposal: Proposal, uniform: npt.NDArray[np.float64]) -> Tensor:
    """What is drawn from after these numbers in [0, 1): the draft alone if it is accepted, else the residual."""
    drafts = torch.from_numpy(proposal.tokens).to(target.device)[:, None]
    chance = _chance(target.gather(1, drafts), proposal.probabilities.gather(1, drafts))
    accepted = torch.from_numpy(uniform).to(target.device)[:, None] < chance
    found = _residual(target, proposal.probabilities).masked_fill_(accepted, 0.0)
    return found.scatter_add_(1, drafts, accepted.to(found.dtype))


def _chance(target: Tensor, draft: Tensor) -> Tensor:
    """Of a draft to be accepted, where it has these probabilities."""
    return target.double() / draft


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """What the target has more than the draft; where rounding leaves nothing of that, the target."""
    more = (target - draft).clamp_(min=0.0)
    return torch.where(more.amax(dim=-1, keepdim=True) > 0, more, target)


def _noise(keys: npt.NDArray[np.uint64], scores: Tensor) -> Tensor:
    """Minus Gumbel noise, of the shape of `scores`, float32 `[rows, vocabulary]`: hashed from a key of each row and the
    token."""
    halves = keys.view(np.int32).reshape(-1, 2, 1)
    tokens = _spread(scores.shape[1])
    if scores.device.type == "cpu":
        bits = torch.from_numpy(_hash(tokens, halves[:, 0], halves[:, 1]))  # arrays cost less per operation
    else:
        on_device = torch.from_numpy(halves).to(scores.device)
        bits = _hash(torch.from_numpy(tokens).to(scores.device), on_device[:, 0], on_device[:, 1])
    uniform = bits.float().add_(0.5).mul_(_UNIT)
    return uniform.neg_().log1p_().neg_().log_()


def _hash(state: Any, low: Any, high: Any) -> Any:
    """31 bits hashed from all three, int32 arrays or tensors, whose products wrap around on purpose."""
    state = state + low
    state ^= (state >> 16) & 0xFFFF
    state *= _FIRST
    state ^= high
    state ^= (state >> 15) & 0x1FFFF
    state *= _SECOND
    state ^= (state >> 16) & 0xFFFF
    state &= 0x7FFFFFFF
    return state


@lru_cache(maxsize=4)
def _spread(vocabulary: int) -> Ids:
    """A number for each token, far from those of its neighbours."""
    return (np.arange(vocabulary, dtype=np.uint32) * np.uint32(0x9E3779B9)).view(np.int32)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's output function; wraps around on purpose."""
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class _Filters:
    """Top-k, top-p and min-p of the rows that have any; `rows` are their indices among those that are drawn."""

    def __init__(self, terms: Terms, rows: Rows, device: torch.device) -> None:
        some = terms[rows]
        top_k = np.where(some["top_k"] > 0, some["top_k"], np.iinfo(np.int64).max)
        self._rows = torch.from_numpy(rows).to(device)
        self._top_k, self._top_p, self._min_p = (
            torch.from_numpy(array.copy()).to(device) for array in (top_k, some["top_p"], some["min_p"])
        )

    @classmethod
    def of(cls, terms: Terms, device: torch.device) -> _Filters | None:
        """The filters of these requests; None if there are none."""
        rows = ((terms["top_k"] > 0) | (terms["top_p"] < 1.0) | (terms["min_p"] > 0.0)).nonzero()[0]
        return cls(terms, rows, device) if len(rows) else None

    def apply(self, scores: Tensor) -> None:
        """Exclude tokens: their scaled logits become minus infinity."""
        some = scores[self._rows]
        probabilities = torch.softmax(some, dim=-1, dtype=torch.float64)
        least = self._least_kept(probabilities)
        scores[self._rows] = some.masked_fill(probabilities < least[:, None], float("-inf"))

    def _least_kept(self, probabilities: Tensor) -> Tensor:
        """Per row, the smallest probability that passes top-k, then top-p of what that kept, then min-p. Equals stay.

        It is a threshold, so that neither the order of equals nor the other rows matter.
        """
        vocabulary, top_p = probabilities.shape[-1], self._top_p
        top_k = self._top_k.clamp(max=vocabulary)
        likeliest = probabilities.topk(min(vocabulary, _MOST_CANDIDATES), dim=-1).values
        unbounded = (top_k == vocabulary) & (top_p >= 1.0)
        few = (top_k <= likeliest.shape[-1]) | ((top_k == vocabulary) & (likeliest.sum(-1) >= top_p)) | unbounded
        least = _prefix_end(likeliest, top_k, top_p)
        if not bool(few.all()):
            many = ~few
            least[many] = _prefix_end(probabilities[many].sort(-1, descending=True).values, top_k[many], top_p[many])
        least = torch.where(unbounded, 0.0, least)
        return torch.maximum(least, self._min_p * likeliest[:, 0])


def _prefix_end(descending: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The last of the leading values of each row that top-k and top-p keep: at least one value is kept.

    Top-p is a share of what top-k kept. The columns may be the most likely of more: without top-k that share is of 1.
    """
    width = descending.shape[-1]
    kept = torch.arange(width, device=descending.device)[None, :] < top_k[:, None]
    total = torch.where(top_k <= width, (descending * kept).sum(-1), 1.0)
    kept &= (descending.cumsum(-1) - descending) < (top_p * total)[:, None]
    return descending.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0))[:, 0]


def _penalise(row: Tensor, request: Request, tokens: Ids) -> None:
    params = request.params
    if params.repetition_penalty != 1.0:
        ids = torch.from_numpy(np.unique(tokens)).long().to(row.device)
        seen = row[ids]
        row[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        unique, counts = np.unique(tokens[request.num_prompt_tokens :], return_counts=True)
        ids = torch.from_numpy(unique).long().to(row.device)
        amount = params.presence_penalty + params.frequency_penalty * counts
        row[ids] -= torch.from_numpy(np.asarray(amount, dtype=np.float32)).to(row.device)


def _logprobs(row: Tensor, token: Tensor, request: Request) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probability of the token, its rank, the highest log-probabilities, their ids), before any adjustment."""
    values = torch.log_softmax(row, dim=-1)
    chosen = values[token]
    top, ids = values.topk(request.params.logprobs or 0)
    return chosen, (values > chosen).sum() + 1, top, ids
