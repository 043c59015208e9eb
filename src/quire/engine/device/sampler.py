"""Sampler: from logits to tokens, for a whole batch at once.

A draw is a function of (seed, sequence index, position) and the logits alone: the token with the highest sum of its
scaled logit and of Gumbel noise, which is hashed for each token and not a generator's state. So a request draws the
same tokens alone, in any batch, and after a preemption, and similar distributions mostly draw the same token.

Drafts that were drawn from known distributions may be verified by rejection sampling instead (`Proposal`): a draft with
probability q is drawn again with chance p / q, by another hashed number, and otherwise a token of what p exceeds q by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.cache.running import Lengths, Rows
from quire.engine.device.filters import Filters
from quire.engine.device.logit_changes import LogitChanges
from quire.engine.messages import TokenLogprobs
from quire.kernels.native.draws import NativeDraws, native_draws
from quire.plan.devices import rows_at_once
from quire.scheduler.step import TERMS, Places
from quire.spec.ids import Ids
from quire.upload import to_device

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
class Reported:
    """Log-probabilities of n rows that report the k highest: of the token drawn, float32 `[n]`, and its rank, int64
    `[n]`; the highest values, float32 `[n, k]`, and their tokens, int64 `[n, k]`."""

    rows: list[int]
    chosen: Tensor
    ranks: Tensor
    values: Tensor
    ids: Tensor

    @classmethod
    def of(cls, rows: list[int], logits: Tensor, tokens: Tensor, count: int) -> Reported:
        """From logits `[n, vocabulary]` before any adjustment, and the tokens int64 `[n]` that were drawn."""
        return cls(rows, *log_probabilities(logits, tokens, count))


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-probability of `tokens[i]` by row i of `logits`, float32 `[n, vocabulary]`, as float32 `[n]`; its rank
    from 1, int64 `[n]`; and the `count` highest, float32 `[n, count]`, with their tokens, int64 `[n, count]`."""
    values = torch.log_softmax(logits, dim=-1)
    chosen = values.gather(1, tokens[:, None])
    top, ids = values.topk(count)
    return chosen[:, 0], (values > chosen).sum(-1) + 1, top, ids


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens drawn for a batch, int64 `[rows]` on the device, and log-probabilities of the rows that report them.

    `probabilities`, if the sampler keeps them, are the rows that are not greedy, and what each of these was drawn from,
    float32 `[rows, vocabulary]`.
    """

    tokens: Tensor
    reported: Sequence[Reported] = ()
    probabilities: tuple[Rows, Tensor] | None = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> Drawn:
        """The tokens and log-probabilities, each moved."""
        reported = [
            Reported(each.rows, *map(move, (each.chosen, each.ranks, each.values, each.ids))) for each in self.reported
        ]
        return Drawn(move(self.tokens), reported)

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """The content of `TokenOutput.logprobs` by row; waits for the device."""
        return {
            row: TokenLogprobs(*each)
            for some in self.reported
            for row, *each in zip(
                some.rows,
                some.chosen.tolist(),
                some.ranks.tolist(),
                some.ids.tolist(),
                some.values.tolist(),
                strict=True,
            )
        }


class Readback:
    """What a step has drawn, copied to pinned memory behind the step. `wait` waits for an event of this step alone: a
    step that was launched after it goes on meanwhile. On a CPU nothing is copied."""

    def __init__(self, drawn: Drawn | None, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._drawn = drawn
        if device.type != "cpu":
            self._drawn = None if drawn is None else drawn.moved(to_host)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> Drawn | None:
        """The draws, in host memory; None if the step has none. Returns when the device has computed the step."""
        if self._event is not None:
            self._event.synchronize()
        return self._drawn


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, once the device has computed the step that is being launched; on a CPU, `tensor`."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


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
        self._changes = LogitChanges(frozenset(eos_token_ids))
        self._seed = seed
        self._keeps = keeps_probabilities
        self._reports = reports_logprobs
        self._draws: _Draws | None = None  # the last step's
        self._native: NativeDraws | None = None

    def prepare(self, places: Places, device: torch.device, proposals: Sequence[Proposal] = ()) -> Prepared:
        """What the host computes of a draw, and sends to the device (`to_device`)."""
        draws = self._draws
        if draws is None or draws.terms is not places.terms:
            draws = self._draws = _Draws(places, self._seed, device)
            if self._native is None and device.type == "cpu":
                self._native = native_draws(TERMS)
        changed = [(row, places.requests[row], int(places.outputs[row])) for row in draws.to_adjust(places.outputs)]
        adjusted = self._changes.of(changed, device) if changed else ()
        if draws.rows is None:
            return Prepared(draws, adjusted)
        return Prepared(draws, adjusted, *draws.noise(places.outputs, proposals, device))

    def draw(
        self, logits: Tensor, places: Places, proposals: Sequence[Proposal] = (), prepared: Prepared | None = None
    ) -> Drawn:
        """Draw a token at `places[i]` from row i of `logits`, float32 `[places, vocabulary]`, overwritten.

        A draft of `proposals` is drawn again where rejection sampling accepts it, and no other token equals it.
        `prepared` is what `prepare` returned for the same places and proposals.
        """
        if prepared is None:
            prepared = self.prepare(places, logits.device, proposals)
        reporting = prepared.draws.reporting if self._reports else ()
        before = [logits[each.index] for each in reporting]  # copies
        probabilities = None
        if self._native is None or self._keeps or not prepared.is_plain:
            scores, probabilities = self._score(logits, prepared)
            tokens = scores.argmax(dim=-1)
        else:
            prepared.adjust(logits)
            tokens = self._native.tokens(logits, places.terms, prepared.keys)
        found = [
            Reported.of(each.rows, rows, tokens[each.index], each.count)
            for each, rows in zip(reporting, before, strict=True)
        ]
        return Drawn(tokens, found, probabilities)

    def scores(self, logits: Tensor, places: Places) -> Tensor:
        """Float32 `[places, vocabulary]`: the token with the highest score is the draw. As for `draw`."""
        return self._score(logits, self.prepare(places, logits.device))[0]

    def _score(self, logits: Tensor, prepared: Prepared) -> tuple[Tensor, tuple[Rows, Tensor] | None]:
        draws, probabilities = prepared.draws, None
        prepared.adjust(logits)
        if draws.rows is None:
            return logits, None
        scores = draws.scale(logits if draws.is_all else logits[draws.rows])
        if self._keeps:
            probabilities = draws.sampled, torch.softmax(scores, dim=-1)
        prepared.add_noise(scores)
        if not draws.is_all:
            logits[draws.rows] = scores
            scores = logits
        return scores, probabilities


@dataclass(slots=True, eq=False)
class Prepared:
    """A draw but for its logits. `keys` are of the noise of rows that are not greedy, uint64, and `halves` the same on
    a device that is not the CPU. `verified` is what rejection sampling reads of each proposal."""

    draws: _Draws
    adjusted: Sequence[Callable[[Tensor], None]]
    keys: npt.NDArray[np.uint64] | None = None
    halves: Tensor | None = None
    verified: Sequence[_Verified] = ()

    @property
    def is_plain(self) -> bool:
        """Whether a row's scores and noise alone decide its draw."""
        return not len(self.verified)

    def adjust(self, logits: Tensor) -> None:
        """Change logits, float32 `[draws, vocabulary]`, in place, where requests ask for it."""
        for adjustment in self.adjusted:
            adjustment(logits)

    def add_noise(self, scores: Tensor) -> None:
        """From now on the highest of each row is its draw."""
        for each in self.verified:
            scores[each.rows] = each.target(torch.softmax(scores[each.rows], dim=-1)).log_()
        assert self.keys is not None
        step = len(scores) if self.halves is None else rows_at_once(scores.shape[1])
        for first in range(0, len(scores), step):
            some, block = scores[first : first + step], slice(first, first + step)
            some.sub_(_noise(self.keys, None if self.halves is None else self.halves[block], some))


@dataclass(frozen=True, slots=True, eq=False)
class _Reporting:
    """Rows that report the `count` highest log-probabilities; `index` is int64 on the device."""

    rows: list[int]
    index: Tensor
    count: int


class _Draws:
    """The sampling terms of some requests, computed once for all steps that have the same requests.

    `sampled` are those that are not greedy; `rows` too, on the device, None if all are greedy.
    """

    def __init__(self, places: Places, seed: int, device: torch.device) -> None:
        self.terms = terms = places.terms
        self.reporting = _reporting(places, device)
        self._adjusted: list[int] = terms["adjusts"].nonzero()[0].tolist()
        self._least = terms["least"].copy() if np.count_nonzero(terms["least"]) else None
        self.sampled: Rows = (~terms["greedy"]).nonzero()[0]
        self.rows: Tensor | None = None
        if len(self.sampled):
            self._sample(self.sampled, seed, device)

    def _sample(self, at: Rows, seed: int, device: torch.device) -> None:
        terms = self.terms
        self.rows = to_device(at, device)
        self.is_all = len(at) == len(terms)
        drawn = terms if self.is_all else terms[at]
        self._scale = to_device((1.0 / drawn["temperature"]).astype(np.float32), device)[:, None]
        self._filtered = Filters.of(drawn, device)
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

    def noise(
        self, outputs: Lengths, proposals: Sequence[Proposal], device: torch.device
    ) -> tuple[npt.NDArray[np.uint64], Tensor | None, Sequence[_Verified]]:
        """The keys and what is verified of a draw (`Prepared`)."""
        where = self._indices + outputs[self.sampled].astype(np.uint64)
        rows = [np.searchsorted(self.sampled, each.draws) for each in proposals]
        for at in rows:
            where[at] += _VERIFYING
        keys = _mix(self._seeds ^ _mix(where))
        verified = [_Verified.of(each, at, keys, device) for each, at in zip(proposals, rows, strict=True)]
        halves = None if device.type == "cpu" else to_device(keys.view(np.int32).reshape(-1, 2, 1), device)
        return keys, halves, verified


def _reporting(places: Places, device: torch.device) -> list[_Reporting]:
    by_count: dict[int, list[int]] = {}
    for row in places.terms["logprobs"].nonzero()[0].tolist():
        by_count.setdefault(places.requests[row].params.logprobs or 0, []).append(row)
    return [_Reporting(rows, to_device(np.array(rows), device), count) for count, rows in by_count.items()]


@dataclass(frozen=True, slots=True, eq=False)
class _Verified:
    """A proposal on the device: rows that are drawn, drafts and numbers in [0, 1), each `[rows]`, and what the drafts
    were drawn from."""

    rows: Tensor
    drafts: Tensor
    uniform: Tensor
    probabilities: Tensor

    @classmethod
    def of(cls, proposal: Proposal, at: Rows, keys: npt.NDArray[np.uint64], device: torch.device) -> _Verified:
        """The drafts for the rows `at`, whose numbers are hashed from the keys of these."""
        uniform = (_mix(keys[at]) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        rows, drafts, numbers = (to_device(each, device) for each in (at, proposal.tokens, uniform))
        return cls(rows, drafts, numbers, proposal.probabilities)

    def target(self, target: Tensor) -> Tensor:
        """What is drawn from, given the target's probabilities: the draft alone if it is accepted, else the
        residual."""
        drafts = self.drafts[:, None]
        chance = _chance(target.gather(1, drafts), self.probabilities.gather(1, drafts))
        accepted = self.uniform[:, None] < chance
        found = _residual(target, self.probabilities).masked_fill_(accepted, 0.0)
        return found.scatter_add_(1, drafts, accepted.to(found.dtype))


def _chance(target: Tensor, draft: Tensor) -> Tensor:
    """Chances of drafts to be accepted, from their probabilities."""
    return target.double() / draft


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """What the target has more than the draft; where rounding leaves nothing of that, the target."""
    more = (target - draft).clamp_(min=0.0)
    return torch.where(more.amax(dim=-1, keepdim=True) > 0, more, target)


def _noise(keys: npt.NDArray[np.uint64], on_device: Tensor | None, scores: Tensor) -> Tensor:
    """Minus Gumbel noise, of the shape of `scores`, float32 `[rows, vocabulary]`: hashed from a key of each row and the
    token."""
    if on_device is None:
        halves = keys.view(np.int32).reshape(-1, 2, 1)  # arrays cost less per operation
        bits = torch.from_numpy(_hash(_spread(scores.shape[1]), halves[:, 0], halves[:, 1]))
    else:
        bits = _hash(_spread_on(scores.shape[1], scores.device), on_device[:, 0], on_device[:, 1])
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


@lru_cache(maxsize=4)
def _spread_on(vocabulary: int, device: torch.device) -> Tensor:
    return to_device(_spread(vocabulary), device)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's output function; wraps around on purpose."""
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
