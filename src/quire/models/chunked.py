"""Llama 4: layers that attend within chunks of positions, and layers without rotation that scale their queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import PagedBatch
from quire.models.attention import OWN_ATTENTION, CallOptions, keep
from quire.models.forward import Forward, in_forward
from quire.upload import to_device


def install_chunks(model: torch.nn.Module) -> None:
    """Let the attention modules of `model` read chunks on the pools, with queries scaled by their positions.

    Their own code would number the rows of a flat batch from 0. Outside a forward pass it still scales queries.
    """
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning") and hasattr(module, "use_rope"):
            setattr(module, OWN_ATTENTION, _ChunkedAttention(module))
            setattr(module, "attn_temperature_tuning", _OutsideOnly(module.attn_temperature_tuning))  # noqa: B010


class _OutsideOnly:
    """A switch that is off during a forward pass on the pools."""

    def __init__(self, switch: Any) -> None:
        self._switch = bool(switch)

    def __bool__(self) -> bool:
        return self._switch and not in_forward()


class _ChunkedAttention:
    def __init__(self, module: Any) -> None:
        chunked = module.config.layer_types[module.layer_idx] == "chunked_attention"
        self._chunk = int(module.config.attention_chunk_size) if chunked else 0
        self._scales = bool(module.attn_temperature_tuning) and not module.use_rope
        self._floor, self._factor = float(module.floor_scale), float(module.attn_scale)

    def __call__(self, forward: Forward, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Tensor:
        options = replace(options, window=self._chunk, chunked=self._chunk > 0)
        kept = keep(forward, key, value, options)
        if self._scales and kept.batch is not None:
            device = query.device  # alone: what is derived is kept for later steps, and would keep the query
            kind = ("query scale", self._floor, self._factor, device)
            scale = kept.batch.derived(kind, lambda batch: to_device(self._query_scale(batch).numpy(), device))
            query = (query * scale).to(query.dtype)
        return kept.attend(query, options)

    def _query_scale(self, batch: PagedBatch) -> Tensor:
        """The factor of each row's query, float32 `[T, 1, 1]`, which grows with its position."""
        positions = torch.from_numpy(np.pad(batch.positions(), (0, len(batch.slots) - batch.num_rows)))
        factor = torch.log1p(torch.floor((positions.float() + 1.0) / self._floor)) * self._factor + 1.0
        return factor.view(-1, 1, 1)
