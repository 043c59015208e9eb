"""Scaled dot-product attention over some of the keys. It also returns the log-sum-exp, which is needed to merge parts.

Shapes are `[batch, heads, rows, dim]` throughout, with any strides. Every row must see at least one key.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_FLASH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_SCORES = 1 << 24
"""Elements of a score matrix that the plain path allocates at once."""


@cache
def native_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for matrix products of `dtype`."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def flash_usable(query: Tensor, key_dim: int, value_dim: int, softcap: float | None) -> bool:
    """Whether `sdpa_flash` supports this case."""
    return query.device.type == "cpu" and key_dim == value_dim and softcap is None and query.dtype in _FLASH_DTYPES


def sdpa_flash(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Torch's blocked CPU kernel. `mask` is float32 and added to the scores; `causal` needs as many rows as keys.

    Returns the output in the dtype of `query` and the log-sum-exp `[batch, heads, rows]` in float32.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def sdpa_math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same by two matrix products, on any device, with unequal dims and a softcap; float32 throughout."""
    rows = query.shape[-2]
    scores_per_row = max(query.shape[0] * query.shape[1] * key.shape[-2], 1)
    step = max(_MAX_SCORES // scores_per_row, 16)
    key, value = key.float(), value.float()
    outs, lses = [], []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        seen = stop if causal else key.shape[-2]
        scores = torch.matmul(query[..., start:stop, :].float(), key[..., :seen, :].transpose(-1, -2)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores + (mask[..., start:stop, :] if mask.shape[-2] > 1 else mask)
        if causal:
            future = torch.ones(stop - start, seen, dtype=torch.bool, device=query.device).triu(start + 1)
            scores = scores.masked_fill(future, float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        outs.append(torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), value[..., :seen, :]))
        lses.append(lse)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, dim=-2), torch.cat(lses, dim=-1))
