"""Block-sparse attention (MiniMax-M3): an indexer selects blocks of tokens, for every KV head its own.

Selecting is the model's own code, run on the sequences of a step in pieces. Where a context has no more blocks than may
be selected, all of it is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.errors import UnsupportedModel
from quire.kernels.attention import PagedBatch, attend_chosen, merge_parts
from quire.kernels.pieces import ChoosingRows
from quire.kernels.tokens import StoredTokens, TokensOfHead
from quire.models.attention import OWN_ATTENTION, AttentionOptions, KeptKeys, keep
from quire.models.forward import RecordingForward, RunningForward, current_forward, in_forward
from quire.models.index_keys import IndexKeys, by_length, indexed_pieces


def install_block_indexers(model: torch.nn.Module) -> int:
    """Let the block-sparse attention modules of `model` select on the pools; returns how many there are."""
    found = 0
    for module in model.modules():
        indexer: Any = getattr(module, "indexer", None)
        if indexer is not None and hasattr(indexer, "topk_blocks"):
            config: Any = module.config
            if indexer.num_heads != config.num_key_value_heads:
                raise UnsupportedModel(
                    f"{type(module).__name__} selects blocks with {indexer.num_heads} heads for "
                    f"{config.num_key_value_heads} KV heads, which is not known here."
                )
            selecting = _BlockIndexer(indexer)
            setattr(module, OWN_ATTENTION, _BlockAttention(selecting))
            indexer.forward = selecting
            found += 1
    return found


class _BlockAttention:
    """Attention of one module over the blocks that its indexer selected."""

    def __init__(self, indexer: _BlockIndexer) -> None:
        self._indexer = indexer

    def __call__(
        self,
        forward: RunningForward | RecordingForward,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """See `OwnAttention`. The selection is among the options: blocks `[1, kv_heads, T, n]`, -1 for none."""
        kept = keep(forward, key, value, options, index_dim=self._indexer.dim)
        if kept.stored is None or kept.batch is None:
            return kept.attend(query, options)
        out = query.new_zeros(*query.shape[:2], value.shape[2])
        most = self._indexer.most
        short, long = kept.batch.derived(("choice", most), lambda batch: _split(batch, most, query.device))
        if short is not None:
            at, part = short
            out[at] = KeptKeys(kept.key[at], kept.value[at], kept.stored, part).attend(query[at], options)
        if long is not None:
            blocks: Tensor = options.others["block_indices"][0, :, long.rows]
            out[long.rows] = self._attend_blocks(query[long.rows], blocks, long, kept, options)
        return out

    def _attend_blocks(
        self, query: Tensor, blocks: Tensor, rows: ChoosingRows, kept: KeptKeys, options: AttentionOptions
    ) -> Tensor:
        """`query` `[rows, heads, dim]` over `blocks` `[kv_heads, rows, n]`."""
        assert kept.stored is not None and kept.batch is not None
        size, device = self._indexer.block_size, query.device
        tokens = StoredTokens(*kept.stored)
        everywhere = kept.batch.derived("positions", lambda batch: torch.from_numpy(batch.positions()).to(device))
        last = everywhere[rows.rows].unsqueeze(1)
        outs = []
        for head, part in enumerate(query.chunk(len(blocks), dim=1)):
            chosen = blocks[head].repeat_interleave(size, dim=1)
            positions = chosen * size + torch.arange(size, device=device).repeat(blocks.shape[2])
            hidden = (chosen < 0) | (positions > last)
            slots = rows.slots_of(positions.masked_fill(hidden, 0))
            found = attend_chosen(part, TokensOfHead(tokens, head), slots, hidden, scale=options.scale)
            outs.append(merge_parts([found], None))
        return torch.cat(outs, dim=1).to(query.dtype)


def _split(
    batch: PagedBatch, most: int, device: torch.device
) -> tuple[tuple[Tensor, PagedBatch] | None, ChoosingRows | None]:
    """The rows that read all of their context, with a batch of their own, and those that read what is selected."""
    short, long = by_length(batch, most)
    whole = None
    if len(short):
        rows, part = batch.part(short, ("whole", most))
        whole = torch.from_numpy(rows).to(device), part
    return whole, ChoosingRows(batch, long, 1, device) if len(long) else None


class _BlockIndexer:
    """An indexer of the model that keeps its keys on the pools."""

    def __init__(self, indexer: Any) -> None:
        self._forward = indexer.forward
        self._heads = int(indexer.num_heads)
        self._most_blocks = int(indexer.topk_blocks)
        self.block_size = int(indexer.block_size)
        self.most = self._most_blocks * self.block_size
        """Tokens of a context that is read whole."""
        self.dim = int(indexer.head_dim)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Any,
        position_ids: Tensor,
    ) -> Tensor:
        """In place of the indexer's `forward`: the blocks that each row selects, int64 `[1, heads, T, n]`, or -1."""
        if not in_forward():
            found: Tensor = self._forward(hidden_states, position_embeddings, past_key_values, position_ids)
            return found
        forward, device, count = current_forward(), hidden_states.device, hidden_states.shape[1]
        if isinstance(forward, RecordingForward):
            return torch.zeros(1, self._heads, count, 0, dtype=torch.int64, device=device)
        stored, batch = forward.rows("index_k", forward.ordinal)  # of the attention call that is to come
        pieces = batch.derived(("pieces", self.most), lambda batch: indexed_pieces(batch, self.most, device))
        selection = torch.full((self._heads, count, self._most_blocks), -1, dtype=torch.int64, device=device)
        for piece in pieces:
            keys = IndexKeys(stored, batch.slots_on(device), piece)
            hidden, cos, sin = (tensor[0][piece.rows] for tensor in (hidden_states, *position_embeddings))
            chosen = self._forward(hidden, (cos, sin), _Cache(keys), piece.positions)
            if keys.given:
                selection[:, piece.rows, : chosen.shape[-1]] = chosen.transpose(0, 1)
        return selection.unsqueeze(0)


class _Cache:
    """What an indexer takes for the cache of transformers: a layer, whichever it asks for."""

    def __init__(self, keys: IndexKeys) -> None:
        self._keys = keys

    @property
    def layers(self) -> _Cache:
        return self

    def __getitem__(self, layer_idx: int) -> _Cache:
        return self

    def update_index(self, keys: Tensor) -> Tensor:
        return self._keys.update(keys[:, 0]).unsqueeze(1)
