"""Block-sparse attention (MiniMax-M3): an indexer selects blocks of tokens, for every KV head its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.errors import UnsupportedModel
from quire.kernels.attention import attend_selected
from quire.kernels.tiles import SelectingRows
from quire.models.attention import OWN_ATTENTION, CallOptions, KeptKeys, keep
from quire.models.forward import Forward, current_forward, in_forward
from quire.models.indexers import index_keys, split_rows
from quire.upload import to_device


def install_block_indexers(model: torch.nn.Module) -> None:
    """Let the block-sparse attention modules of `model` select on the pools."""
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


class _BlockAttention:
    """Attention of one module over the blocks that its indexer selected."""

    def __init__(self, indexer: _BlockIndexer) -> None:
        self._indexer = indexer

    def __call__(self, forward: Forward, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Tensor:
        """See `OwnAttention`. The selection is among the options: blocks `[1, kv_heads, T, n]`, -1 for none."""
        kept = keep(forward, key, value, options, index_dim=self._indexer.dim)
        if kept.batch is None:
            return kept.attend(query, options)
        out = query.new_zeros(*query.shape[:2], value.shape[2])
        short, long = split_rows(kept.batch, self._indexer.most, query.device)
        if short is not None:
            at, part = short
            out[at] = replace(kept, batch=part).attend(query[at], options)
        if long is not None:
            blocks: Tensor = options.others["block_indices"][0, :, long.rows]
            out[long.rows] = self._attend_blocks(query[long.rows], blocks, long, kept, options)
        return out

    def _attend_blocks(
        self, query: Tensor, blocks: Tensor, rows: SelectingRows, kept: KeptKeys, options: CallOptions
    ) -> Tensor:
        """`query` `[rows, heads, dim]` over `blocks` `[kv_heads, rows, n]`."""
        assert kept.fields is not None and kept.batch is not None
        size, device = self._indexer.block_size, query.device
        everywhere = kept.batch.derived("positions", lambda batch: to_device(batch.positions(), device))
        last = everywhere[rows.rows].unsqueeze(1)
        outs = []
        for head, part in enumerate(query.chunk(len(blocks), dim=1)):
            chosen = blocks[head].repeat_interleave(size, dim=1)
            positions = chosen * size + torch.arange(size, device=device).repeat(blocks.shape[2])
            hidden = (chosen < 0) | (positions > last)
            slots = rows.slots_of(positions.masked_fill(hidden, 0))
            out, _ = attend_selected(part, kept.fields.head(head), slots, hidden, options, kept.batch.backend)
            outs.append(out)
        return torch.cat(outs, dim=1).to(query.dtype)


class _BlockIndexer:
    """An indexer of the model that stores its keys in the pools."""

    def __init__(self, indexer: Any) -> None:
        self._forward = indexer.forward
        self._heads = int(indexer.num_heads)
        self._most_blocks = int(indexer.topk_blocks)
        self.block_size = int(indexer.block_size)
        self.most = self._most_blocks * self.block_size
        """Tokens of a context up to which all of it is read."""
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
        shape, device = (self._heads, hidden_states.shape[1], self._most_blocks), hidden_states.device
        selection = torch.full(shape, -1, dtype=torch.int64, device=device)
        for keys in index_keys(current_forward(), self.most, device):
            rows = keys.tile.rows
            hidden, cos, sin = (tensor[0][rows] for tensor in (hidden_states, *position_embeddings))
            chosen = self._forward(hidden, (cos, sin), keys, keys.tile.positions)
            if keys.selects:
                selection[:, rows, : chosen.shape[-1]] = chosen.transpose(0, 1)
        return selection.unsqueeze(0)
