"""The attention function that Hugging Face models call instead of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from quire.errors import UnsupportedModel
from quire.kernels.attention import paged_attention
from quire.models.forward import ComparingForward, RecordingForward, RunningForward, current_forward
from quire.spec.layers import AttentionCall

IMPLEMENTATION = "quire"
"""Name under which the function is registered; no mask function goes with it, so models build no masks."""


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a model calls: `query` `[1, heads, T, dim]`, `key` and `value` `[1, kv_heads, T, dim]`, rotated already."""
    forward = current_forward()
    for name in ("indices", "block_indices"):
        if others.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} selects tokens with an indexer, which is not held here.")
    call = AttentionCall(
        kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3], window=int(sliding_window or 0)
    )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, dim]
    if isinstance(forward, RecordingForward):
        forward.note(call)
        return query.new_zeros(1, query.shape[0], query.shape[1], value.shape[2]), None
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    def attend(running: RunningForward) -> Tensor:
        return _attend(running, query, key, value, call, scale=scale, softcap=softcap, sinks=s_aux)

    out = forward.compared(attend) if isinstance(forward, ComparingForward) else attend(forward)
    return out.unsqueeze(0), None


def _attend(
    forward: RunningForward,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Store the new keys and values at their slots and attend: `[T, heads, value_dim]`."""
    ordinal = forward.next_ordinal()
    keys, batch = forward.rows("k", ordinal)
    values, _ = forward.rows("v", ordinal)
    slots = batch.slots_on(query.device)
    return paged_attention(
        query,
        keys.write(slots, key),
        values.write(slots, value),
        keys,
        values,
        batch,
        scale=scale,
        window=call.window,
        softcap=softcap,
        sinks=sinks,
    )


AttentionInterface.register(IMPLEMENTATION, _attention)
