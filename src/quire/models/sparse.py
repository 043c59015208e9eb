"""Sparse latent attention (DSA): an indexer selects the tokens that attention reads, by keys of its own.

Selecting is the model's own code, run on the sequences of a step as batches of one length: all sequences with one new
token together, and each with more by itself. Where a context is no longer than what may be selected, all of it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention import PagedBatch, attend_slots
from quire.kernels.segments import Slots
from quire.kernels.stored import StoredRows
from quire.kernels.tokens import JoinedTokens
from quire.models.attention import OWN_ATTENTION, AttentionOptions
from quire.models.forward import RecordingForward, RunningForward, current_forward, in_forward
from quire.models.latent import LatentAttention, Stored

MAX_SCORES = 1 << 16
"""Pairs of a row and a key that are scored at once, in every head of an indexer."""


def install_indexers(model: torch.nn.Module) -> int:
    """Let the sparse attention modules of `model` select on the pools; returns how many there are.

    Latents must have been installed. A model with indexers wants a mask to give them: `no_mask`.
    """
    found = 0
    for module in model.modules():
        latent = getattr(module, OWN_ATTENTION, None)
        if not hasattr(module, "indexer") or not isinstance(latent, LatentAttention):
            continue
        config: Any = module.config
        indexer: Any = module.indexer
        owner = None if indexer is None else _Indexer(indexer)
        setattr(module, OWN_ATTENTION, _SparseAttention(latent, owner, int(config.index_topk)))
        if owner is not None:
            indexer.forward = owner
        found += 1
    return found


def no_mask(device: torch.device) -> Tensor:
    """A mask for models whose code takes a part of it before it asks an indexer. It is not read."""
    return torch.zeros(1, 1, 1, 1, device=device)


class _SparseAttention:
    """Attention of one module over the latents that its own indexer selected, or an earlier layer's."""

    def __init__(self, latent: LatentAttention, indexer: _Indexer | None, most: int) -> None:
        self._latent = latent
        self._index_dim = 0 if indexer is None else indexer.dim
        self._most = most

    def __call__(
        self,
        forward: RunningForward | RecordingForward,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """See `OwnAttention`. The selection is among the options: positions `[1, T, n]`, -1 where there is none."""
        kept = self._latent.keep(forward, key, value, sparse=True, index_dim=self._index_dim)
        out = query.new_zeros(*query.shape[:2], self._latent.value_dim)
        if kept is None:
            return out
        rows, stored, batch = kept
        selection: Tensor = options.others["indices"][0]
        choice = batch.derived(("selected", self._most), lambda batch: _Choice(batch, self._most, query.device))
        if choice.dense is not None:
            at, part = choice.dense
            out[at] = self._latent.attend(query[at], (rows[0][at], rows[1][at]), stored, part, options)
        if len(choice.rows):
            out[choice.rows] = self._attend_selected(query, selection, stored, choice, options)
        return out

    def _attend_selected(
        self, query: Tensor, selection: Tensor, stored: Stored, choice: _Choice, options: AttentionOptions
    ) -> Tensor:
        positions = selection[choice.rows].long()
        slots = choice.slots_of(positions.clamp_min(0))
        absorbed = self._latent.absorb(query[choice.rows])
        out = attend_slots(
            absorbed, JoinedTokens(*stored), slots, positions < 0, scale=options.scale, sinks=options.sinks
        )
        return self._latent.release(out)


class _Choice:
    """Which rows of a step read all of their context, and which read what is selected."""

    def __init__(self, batch: PagedBatch, most: int, device: torch.device) -> None:
        new = np.diff(batch.query_starts)
        short = np.flatnonzero((batch.context_lens <= most) & (new > 0))
        self.dense: tuple[Tensor, PagedBatch] | None = None
        if len(short):
            rows, part = batch.part(short)
            self.dense = torch.from_numpy(rows).to(device), part
        long = np.flatnonzero((batch.context_lens > most) & (new > 0))
        rows, part = batch.part(long)
        self.rows = torch.from_numpy(rows).to(device)
        owners = np.repeat(np.arange(len(long)), new[long])
        self._owners = torch.from_numpy(owners).to(device).unsqueeze(1)
        self._frames = torch.from_numpy(part.frames.astype(np.int64)).to(device)
        self._page_size = batch.page_size

    def slots_of(self, positions: Tensor) -> Tensor:
        """The slots of `positions` `[rows, n]` of each row's sequence."""
        frames = self._frames[self._owners, positions // self._page_size]
        return frames * self._page_size + positions % self._page_size


class _Indexer:
    """An indexer of the model that keeps its keys on the pools."""

    def __init__(self, indexer: Any) -> None:
        self._forward = indexer.forward
        self._most = int(indexer.index_topk)
        self.dim = int(indexer.head_dim)

    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Tensor:
        """In place of the indexer's `forward`: the positions that each row selects, int32 `[1, T, n]`, or -1."""
        inputs = (hidden_states, q_resid, *position_embeddings)
        if not in_forward():
            found: Tensor = self._forward(
                hidden_states, q_resid, position_embeddings, attention_mask, position_ids, past_key_values, **others
            )
            return found
        forward = current_forward()
        if isinstance(forward, RecordingForward):
            return hidden_states.new_zeros(1, hidden_states.shape[1], 0, dtype=torch.int32)
        stored, batch = forward.rows("index_k", forward.ordinal)  # of the attention call that is to come
        device = hidden_states.device
        pieces = batch.derived(("pieces", self._most), lambda batch: list(_pieces(batch, self._most, device)))
        width = max((piece.width for piece in pieces), default=0)
        selection = hidden_states.new_full((hidden_states.shape[1], min(width, self._most)), -1, dtype=torch.int32)
        for piece in pieces:
            keys = _IndexKeys(stored, batch.slots_on(device), piece)
            hidden, query, cos, sin = (tensor[0][piece.rows] for tensor in inputs)
            chosen = self._forward(hidden, query, (cos, sin), piece.visible, piece.positions, keys, **others)
            if piece.width:
                chosen = chosen.masked_fill(chosen > piece.positions.unsqueeze(-1), -1)
                selection[piece.rows, : chosen.shape[-1]] = chosen
        return selection.unsqueeze(0)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Rows that an indexer takes at once: `[sequences, count]` of the flat batch, and the keys each may select."""

    rows: Tensor
    positions: Tensor  # [sequences, count] of the rows
    keys: Tensor  # [sequences * width] slots of each sequence's keys, padded with its last one
    visible: Tensor  # [sequences, count, width] which of them a row may select
    width: int  # 0: all of them are read anyway; the keys of the rows are only stored


class _IndexKeys:
    """What an indexer takes for its cache: stores the keys of a piece's rows and gives it those of their sequences."""

    def __init__(self, stored: StoredRows, slots: Tensor, piece: _Piece) -> None:
        self._stored = stored
        self._slots = slots
        self._piece = piece

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        """`keys` `[sequences, count, dim]` of the rows, in exchange for `[sequences, width, dim]`, theirs included."""
        piece = self._piece
        self._stored.write(self._slots[piece.rows.flatten()], keys.flatten(0, 1))
        if not piece.width:
            return keys[:, :1]
        found = self._stored.gather(piece.keys, keys.dtype, "index_k")
        return found.view(keys.shape[0], piece.width, -1)


def _pieces(batch: PagedBatch, most: int, device: torch.device) -> Iterator[_Piece]:
    """The rows of a step, in the order in which each sequence's must be taken."""
    new, contexts = np.diff(batch.query_starts).astype(np.int64), batch.context_lens.astype(np.int64)
    short = np.flatnonzero((contexts <= most) & (new > 0))
    if len(short):
        rows = torch.from_numpy(batch.part(short)[0]).to(device).unsqueeze(0)
        nothing = rows.new_zeros(0)
        visible = torch.ones(1, rows.shape[1], 1, dtype=torch.bool, device=device)
        yield _Piece(rows, rows, nothing, visible, 0)
    single = np.flatnonzero((contexts > most) & (new == 1))
    single = single[np.argsort(contexts[single], kind="stable")]
    while len(single):
        fitting = np.arange(1, len(single) + 1) * contexts[single] <= MAX_SCORES
        count = max(1, int(fitting.argmin()) if not fitting.all() else len(single))
        yield _piece(batch, single[:count], contexts[single[:count]], 1, device)
        single = single[count:]
    for sequence in np.flatnonzero((contexts > most) & (new > 1)):
        stop = int(contexts[sequence])
        size = max(1, MAX_SCORES // stop)
        for start in range(stop - int(new[sequence]), stop, size):
            end = min(start + size, stop)
            yield _piece(batch, np.array([sequence]), np.array([end]), end - start, device)


def _piece(batch: PagedBatch, sequences: Slots, stops: Slots, count: int, device: torch.device) -> _Piece:
    """The `count` rows of each of `sequences` that end before position `stops[i]`."""
    width = int(stops.max())
    last = batch.query_starts[sequences + 1].astype(np.int64) - (batch.context_lens[sequences] - stops)
    offsets = np.arange(-count, 0)
    positions = stops[:, None] + offsets
    columns = np.minimum(np.arange(width), stops[:, None] - 1)
    frames = np.take_along_axis(batch.frames[sequences].astype(np.int64), columns // batch.page_size, axis=1)
    keys = frames * batch.page_size + columns % batch.page_size
    visible = np.arange(width) <= positions[:, :, None]
    arrays = (last[:, None] + offsets, positions, keys.reshape(-1), visible)
    rows, at, slots, mask = (torch.from_numpy(array).to(device) for array in arrays)
    return _Piece(rows, at, slots, mask, width)
