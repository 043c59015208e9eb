"""Sparse latent attention (DSA): an indexer selects the tokens whose latents attention reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.attention import attend_selected, merge_attention
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import LatentFields
from quire.models.attention import OWN_ATTENTION, CallOptions
from quire.models.forward import Forward, RunningForward, current_forward, in_forward
from quire.models.indexers import index_keys, split_decoding, split_rows
from quire.models.latent import LatentAttention


def install_indexers(model: torch.nn.Module) -> bool:
    """Let the sparse attention modules of `model` select on the pools; returns whether there are any.

    Latent attention must have been installed.
    """
    found = False
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
        found = True
    return found


class _SparseAttention:
    """Attention of one module over the latents selected by its own indexer, or by an earlier layer's."""

    def __init__(self, latent: LatentAttention, indexer: _Indexer | None, most: int) -> None:
        self._latent = latent
        self._index_dim = 0 if indexer is None else indexer.dim
        self._most = most

    def __call__(self, forward: Forward, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Tensor:
        """See `OwnAttention`. The selection is among the options: positions `[1, T, n]`, -1 for none."""
        kept = self._latent.keep(forward, key, value, sparse=True, index_dim=self._index_dim)
        out = query.new_zeros(*query.shape[:2], self._latent.value_dim)
        if kept is None:
            return out
        fields, batch = kept
        selected: Tensor = options.others["indices"][0]
        assert isinstance(forward, RunningForward)
        if forward.hisparse is None:
            return self._read(query, selected, fields, batch, options)
        decoding, others = split_decoding(batch, query.device)
        if decoding is not None:
            at, part = decoding
            hot = LatentFields(*(forward.hot_rows(name, forward.ordinal - 1) for name in ("latent", "rope")))
            hot.write(forward.hisparse.newest(part), key[at, 0], value[at, 0])
            swapped = forward.hisparse.swap_in(forward.ordinal - 1, part, self._positions(selected[at], part))
            out[at] = self._attend(query[at], hot, swapped.slots, swapped.hidden, part, options)
        if others is not None:
            at, part = others
            out[at] = self._read(query[at], selected[at], fields, part, options)
        return out

    def _read(
        self, query: Tensor, selected: Tensor, fields: LatentFields, batch: PagedBatch, options: CallOptions
    ) -> Tensor:
        """Attention over the pages themselves."""
        out = query.new_zeros(*query.shape[:2], self._latent.value_dim)
        short, long = split_rows(batch, self._most, query.device)
        if short is not None:
            at, part = short
            out[at] = self._latent.attend(query[at], fields, part, options)
        if long is not None:
            positions = selected[long.rows].long()
            slots = long.slots_of(positions.clamp_min(0))
            out[long.rows] = self._attend(query[long.rows], fields, slots, positions < 0, batch, options)
        return out

    def _attend(
        self,
        query: Tensor,
        fields: LatentFields,
        slots: Tensor,
        hidden: Tensor,
        batch: PagedBatch,
        options: CallOptions,
    ) -> Tensor:
        """Attention over `slots` `[rows, n]` of `fields`, those of each row."""
        absorbed = self._latent.absorb(query)
        found = attend_selected(absorbed, fields, slots, hidden, options, batch.backend)
        return self._latent.release(merge_attention([found], options.sinks).to(query.dtype))

    def _positions(self, selected: Tensor, batch: PagedBatch) -> npt.NDArray[np.int32]:
        """The positions `[sequences, n]` that rows of one token read, -1 at the end: all, if that is no more than is
        selected."""
        contexts = batch.context_lens[:, None]
        width = min(int(contexts.max()), self._most)
        places = np.arange(width, dtype=np.int32)
        found = np.where(places < contexts, places, np.int32(-1))
        selects = contexts[:, 0] > self._most
        if selects.any():
            found[selects] = selected.cpu().numpy()[selects, :width]
        return found


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
        if not in_forward():
            found: Tensor = self._forward(
                hidden_states, q_resid, position_embeddings, attention_mask, position_ids, past_key_values, **others
            )
            return found
        tiles = index_keys(current_forward(), self._most, hidden_states.device)
        width = max((keys.tile.width for keys in tiles), default=0)
        selection = hidden_states.new_full((hidden_states.shape[1], min(width, self._most)), -1, dtype=torch.int32)
        for keys in tiles:
            tile = keys.tile
            hidden, query, cos, sin = (
                tensor[0][tile.rows] for tensor in (hidden_states, q_resid, *position_embeddings)
            )
            chosen = self._forward(hidden, query, (cos, sin), tile.visible, tile.positions, keys, **others)
            if keys.selects:
                chosen = chosen.masked_fill(chosen > tile.positions.unsqueeze(-1), -1)
                selection[tile.rows, : chosen.shape[-1]] = chosen
        return selection.unsqueeze(0)
