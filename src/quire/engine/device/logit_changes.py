"""Changes of logits before a draw: biases, penalties and suppressed tokens, for all requests of a batch at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.cache.running import Rows
from quire.scheduler.request import Request
from quire.spec.ids import Ids
from quire.upload import to_device

Changed = tuple[int, Request, int]
"""A row of the logits, its request, and how many tokens that has drawn before."""

_Entries = list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]]  # row, tokens, a number for each


def adjustments(
    changed: Sequence[Changed], eos: frozenset[int], device: torch.device
) -> list[Callable[[Tensor], None]]:
    """What changes logits `[rows, vocabulary]` in place, in order. Requests without an entry are not changed."""
    biases: _Entries = []
    repeated: _Entries = []
    present: _Entries = []
    suppressed: _Entries = []
    for row, request, place in changed:
        params = request.params
        if params.logit_bias:
            biases.append((row, _ids(params.logit_bias), np.array(list(params.logit_bias.values()), dtype=np.float32)))
        if params.needs_history:
            tokens = request.tokens_before(place)
            if params.repetition_penalty != 1.0:
                ids = np.unique(tokens).astype(np.int64)
                repeated.append((row, ids, np.full(len(ids), params.repetition_penalty, dtype=np.float32)))
            if params.presence_penalty or params.frequency_penalty:
                ids, counts = np.unique(tokens[request.num_prompt_tokens :], return_counts=True)
                amount = params.presence_penalty + params.frequency_penalty * counts
                present.append((row, ids.astype(np.int64), amount.astype(np.float32)))
        if place < params.min_tokens:
            ids = _ids(request.stop_ids | eos)
            suppressed.append((row, ids, np.full(len(ids), -np.inf, dtype=np.float32)))
    kinds = ((biases, _add), (repeated, _penalise), (present, _subtract), (suppressed, _replace))
    return [partial(change, *_sent(entries, device)) for entries, change in kinds if entries]


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
    logits[rows, ids] += numbers


def _penalise(rows: Tensor, ids: Tensor, numbers: Tensor, logits: Tensor) -> None:
    seen = logits[rows, ids]
    logits[rows, ids] = torch.where(seen > 0, seen / numbers, seen * numbers)


def _subtract(rows: Tensor, ids: Tensor, numbers: Tensor, logits: Tensor) -> None:
    logits[rows, ids] -= numbers


def _replace(rows: Tensor, ids: Tensor, numbers: Tensor, logits: Tensor) -> None:
    logits[rows, ids] = numbers
