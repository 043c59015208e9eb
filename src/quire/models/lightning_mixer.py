"""The forward pass of MiniMax's lightning attention over pieces that begin with a state, in blocks of many tokens.

transformers continues a sequence token by token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.models.mixer_cache import States


def lightning_mixer(layer: Any, rows: Tensor, states: States, positions: Tensor | None) -> Tensor:
    """Outputs `[pieces, S, hidden]` of `layer` for `rows` of the same shape.

    The state of a head is the sum of the products of its keys and values, decayed by a constant per token.
    """
    heads, dim = layer.num_attention_heads, layer.head_dim
    mixed = layer.act_fn(layer.qkv_proj(rows)).unflatten(-1, (heads, 3 * dim)).transpose(1, 2)
    query, key, value = torch.split(mixed, dim, dim=-1)  # [pieces, heads, S, dim]
    state = states.recurrence(rows, heads, dim, dim)
    outs = []
    for start in range(0, rows.shape[1], layer.block_size):
        block = slice(start, start + layer.block_size)
        q, k, v = query[:, :, block], key[:, :, block], value[:, :, block]
        count = q.shape[2]
        inner = (q @ k.transpose(-1, -2) * layer.diagonal_decay[:, :, :count, :count]) @ v
        outs.append(inner + (q * layer.query_decay[:, :count]) @ state.to(q.dtype))
        decay = torch.exp(-layer.slope_rate.float() * count)
        state = state * decay + ((k * layer.key_decay[:, -count:]).transpose(-1, -2) @ v).float()
    states.update_recurrent_state(state)
    out = layer.norm(torch.cat(outs, dim=2).transpose(1, 2).flatten(2))
    result: Tensor = layer.out_proj(torch.sigmoid(layer.output_gate(rows)) * out)
    return result
