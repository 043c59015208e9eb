"""Attention of windows in blocks, for long training rows: the cost follows the window, and no mask covers a row.

transformers' own attention computes all pairs of a window layer and masks most of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

NAME = "blocks"


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of rows without padding, `[rows, heads, length, dim]`, returned as `[rows, length, heads, dim]`.

    With one query and a cache, the query sees all keys: a generation must end within the window.
    """
    length = query.size(2)
    options = {"scale": scaling, "enable_gqa": True}
    if sliding_window is None or length <= sliding_window:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=length > 1, **options)
        return out.transpose(1, 2), None
    width = sliding_window
    padding = -length % width
    query, key, value = (functional.pad(tensor, (0, 0, 0, padding)) for tensor in (query, key, value))
    rows, heads, padded, dim = query.shape
    blocks = padded // width

    def with_previous(tensor: Tensor) -> Tensor:
        """Each block after the block before it: `[rows * blocks, heads, 2 * width, dim]`."""
        before = functional.pad(tensor, (0, 0, width, 0))
        return before.unfold(2, 2 * width, width).permute(0, 2, 1, 4, 3).flatten(0, 1)

    at = torch.arange(2 * width)
    distance = at[width:, None] - at
    seen = ((distance >= 0) & (distance < width)).repeat(blocks, 1, 1)
    seen[0, :, :width] = False  # no block is before the first
    out = functional.scaled_dot_product_attention(
        query.view(rows, heads, blocks, width, dim).transpose(1, 2).flatten(0, 1),
        with_previous(key),
        with_previous(value),
        attn_mask=seen.repeat(rows, 1, 1)[:, None],
        **options,
    )
    out = out.view(rows, blocks, heads, width, dim).permute(0, 1, 3, 2, 4).flatten(1, 2)
    return out[:, :length], None


AttentionInterface.register(NAME, block_attention)
