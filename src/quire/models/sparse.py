"""Sparse latent attention (DSA): an indexer selects the tokens that attention reads, by keys of its own.

Selecting is the model's own code, run on the sequences of a step as batches of one length: all sequences with one new
token together, and each with more by itself. Where a context is no longer than what may be selected, all of it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention import PagedBatch, attend_chosen, merge_parts
from quire.kernels.pieces import ChoosingRows
from quire.kernels.tokens import JoinedTokens
from quire.models.attention import OWN_ATTENTION, AttentionOptions
from quire.models.forward import RecordingForward, RunningForward, current_forward, in_forward
from quire.models.index_keys import IndexKeys, by_length, indexed_pieces
from quire.models.latent import LatentAttention


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
        short, long = batch.derived(("choice", self._most), lambda batch: self._split(batch, query.device))
        if short is not None:
            at, part = short
            out[at] = self._latent.attend(query[at], (rows[0][at], rows[1][at]), stored, part, options)
        if long is not None:
            positions: Tensor = options.others["indices"][0, long.rows].long()
            absorbed, tokens = self._latent.absorb(query[long.rows]), JoinedTokens(*stored)
            slots = long.slots_of(positions.clamp_min(0))
            chosen = attend_chosen(absorbed, tokens, slots, positions < 0, scale=options.scale)
            out[long.rows] = self._latent.release(merge_parts([chosen], options.sinks).to(query.dtype))
        return out

    def _split(
        self, batch: PagedBatch, device: torch.device
    ) -> tuple[tuple[Tensor, PagedBatch] | None, ChoosingRows | None]:
        """The rows that read all of their context, with a batch of their own, and those that read what is selected."""
        short, long = by_length(batch, self._most)
        whole = None
        if len(short):
            rows, part = batch.part(short, ("whole", self._most))
            whole = torch.from_numpy(rows).to(device), part
        return whole, ChoosingRows(batch, long, 1, device) if len(long) else None


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
        pieces = batch.derived(("pieces", self._most), lambda batch: indexed_pieces(batch, self._most, device))
        width = max((piece.width for piece in pieces), default=0)
        selection = hidden_states.new_full((hidden_states.shape[1], min(width, self._most)), -1, dtype=torch.int32)
        for piece in pieces:
            keys = IndexKeys(stored, batch.slots_on(device), piece)
            hidden, query, cos, sin = (tensor[0][piece.rows] for tensor in inputs)
            cache = _Cache(keys)
            chosen = self._forward(hidden, query, (cos, sin), piece.visible, piece.positions, cache, **others)
            if keys.given:
                chosen = chosen.masked_fill(chosen > piece.positions.unsqueeze(-1), -1)
                selection[piece.rows, : chosen.shape[-1]] = chosen
        return selection.unsqueeze(0)


class _Cache:
    """What an indexer takes for the cache of transformers."""

    def __init__(self, keys: IndexKeys) -> None:
        self._keys = keys

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        return self._keys.update(keys)
