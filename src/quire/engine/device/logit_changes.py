"""Changes of logits before a draw: biases, penalties and suppressed tokens, for all requests of a batch at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.cache.running import Rows
from quire.engine.device.token_counts import TokenCounts
from quire.scheduler.request import Request
from quire.spec.ids import Ids
from quire.upload import to_device

Changed = tuple[int, Request, int]
"""A row of the logits, its request, and how many tokens that has drawn before."""

_Entries = list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]]  # row, tokens, a number for each


class LogitChanges:
    """What requests change of their logits. What penalties count of a request is kept from step to step."""

    def __init__(self, eos: frozenset[int]) -> None:
        self._eos = eos
        self._all, self._outputs = (WeakKeyDictionary[Request, TokenCounts]() for _ in range(2))

    def of(self, changed: Sequence[Changed], device: torch.device) -> list[Callable[[Tensor], None]]:
        """What changes logits float32 `[rows, vocabulary]`, contiguous, in place, in order. Rows of one request follow
        each other; tokens before its later rows are drafts, and so are those that it does not have yet. Requests
        without an entry are not changed."""
        biases: _Entries = []
        repeated: _Entries = []
        present: _Entries = []
        suppressed: _Entries = []
        before: Request | None = None
        for row, request, place in changed:
            params = request.params
            if params.logit_bias:
                bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
                biases.append((row, _ids(params.logit_bias), bias))
            if params.needs_history:
                tokens = request.tokens_before(place)
                is_ahead = request is before or len(tokens) > request.num_tokens
                if params.repetition_penalty != 1.0:
                    ids = _counted(self._all, request, tokens, is_ahead=is_ahead).ids
                    repeated.append((row, ids, np.full(len(ids), params.repetition_penalty, dtype=np.float32)))
                if params.presence_penalty or params.frequency_penalty:
                    found = _counted(self._outputs, request, tokens[request.num_prompt_tokens :], is_ahead=is_ahead)
                    amount = params.presence_penalty + params.frequency_penalty * found.counts
                    present.append((row, found.ids, amount.astype(np.float32)))
            if place < params.min_tokens:
                ids = _ids(request.stop_ids | self._eos)
                suppressed.append((row, ids, np.full(len(ids), -np.inf, dtype=np.float32)))
            before = request
        kinds = ((biases, _add), (repeated, _penalise), (present, _subtract), (suppressed, _replace))
        return [partial(change, *_sent(entries, device)) for entries, change in kinds if entries]


def _counted(
    kept: WeakKeyDictionary[Request, TokenCounts], request: Request, tokens: Ids, *, is_ahead: bool
) -> TokenCounts:
    """The counts of `tokens`, of which those of a draft are not kept."""
    counts = kept.setdefault(request, TokenCounts())
    if is_ahead:
        return counts.ahead(tokens)
    counts.advance(tokens)
    return counts


def limit(rows: Rows, bits: Ids, device: torch.device) -> Callable[[Tensor], None]:
    """What makes the logits of some rows -inf but at tokens whose bits are set, int32 `[rows, vocabulary / 32]`."""
    if device.type == "cpu":
        some = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        return partial(_limit, torch.from_numpy(rows), torch.from_numpy(some))
    words = to_device(bits, device)
    places = torch.arange(32, dtype=torch.int32, device=device)
    return partial(_limit, to_device(rows, device), ((words[:, :, None] >> places) & 1).flatten(1).bool())


def _limit(rows: Tensor, allowed: Tensor, logits: Tensor) -> None:
    forbidden = ~allowed[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def _ids(tokens: object) -> npt.NDArray[np.int64]:
    return np.array(list(tokens), dtype=np.int64)  # type: ignore[call-overload]


def _sent(entries: _Entries, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, tokens and numbers, all `[entries]`; no pair of a row and a token is there twice."""
    rows = np.repeat(np.array([row for row, _, _ in entries]), [len(ids) for _, ids, _ in entries])
    ids, numbers = (np.concatenate(column) for column in ([e[1] for e in entries], [e[2] for e in entries]))
    return to_device(rows, device), to_device(ids, device), to_device(numbers, device)


def _add(rows: Tensor, ids: Tensor, numbers: Tensor, logits: Tensor) -> None:
    _change(rows, ids, logits, lambda found: found + numbers)


def _penalise(rows: Tensor, ids: Tensor, numbers: Tensor, logits: Tensor) -> None:
    _change(rows, ids, logits, lambda seen: torch.where(seen > 0, seen / numbers, seen * numbers))


def _subtract(rows: Tensor, ids: Tensor, numbers: Tensor, logits: Tensor) -> None:
    _change(rows, ids, logits, lambda found: found - numbers)


def _replace(rows: Tensor, ids: Tensor, numbers: Tensor, logits: Tensor) -> None:
    _change(rows, ids, logits, lambda _: numbers)


def _change(rows: Tensor, ids: Tensor, logits: Tensor, new: Callable[[Tensor], Tensor]) -> None:
    """In one dimension: with two, operators of torch take several times as long."""
    flat, places = logits.view(-1), rows * logits.shape[1] + ids
    flat.index_copy_(0, places, new(flat.index_select(0, places)))
