"""Attention to selected pages as one pass of the model's own code over a sequence, with loops instead of pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from quire.models.attention import IMPLEMENTATION
from quire.models.hf import LoadedModel

_REFERENCE = "page_reference"
_settings: dict[str, int] = {}


def _selected(query: Tensor, keys: Tensor, page_size: int, top_k: int) -> set[int]:
    """Positions that a row with a scaled `query` `[heads, dim]` reads of `keys` `[kv_heads, n, dim]`, of which its own
    is the last."""
    count = -(-keys.shape[1] // page_size)
    most = top_k // page_size
    shares = torch.zeros(count - 1)
    limits = torch.zeros(count - 1, len(query))
    for page in range(count - 1):
        own = keys[:, page * page_size : (page + 1) * page_size]
        low, high = (bound.repeat_interleave(len(query) // len(keys), dim=0) for bound in (own.amin(1), own.amax(1)))
        limits[page] = torch.maximum(query * low, query * high).sum(-1)
    for head in range(len(query)):
        shares += limits[:, head].exp() / limits[:, head].exp().sum()
    chosen = sorted(range(count - 1), key=lambda page: -shares[page])[: most - 1]
    pages = [*chosen, count - 1]
    return {page * page_size + i for page in pages for i in range(page_size)} & set(range(keys.shape[1]))


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if sliding_window:
        seen &= ~seen.tril(-sliding_window)
    else:
        for row in range(_settings["decoded"], length):
            keys = key[0, :, : row + 1].float()
            found = _selected(query[0, :, row].float() * scaling, keys, _settings["page_size"], _settings["top_k"])
            seen[row] = torch.tensor([at in found for at in range(length)])
    keys, values = (rows[0].float().repeat_interleave(group, dim=0) for rows in (key, value))
    scores = query[0].float() @ keys.transpose(1, 2) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.float().view(-1, 1, 1).expand(-1, length, 1)), dim=-1)
    out = scores.softmax(-1)[..., :length] @ values
    return out.to(query.dtype).transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(_REFERENCE, _attention)


@torch.inference_mode()
def page_logits(model: LoadedModel, tokens: Sequence[int], *, decoded: int, page_size: int, top_k: int) -> Tensor:
    """Logits float32 `[T, vocab]` if the rows from `decoded` on read selected pages, and those before all tokens."""
    _settings.update(decoded=decoded, page_size=page_size, top_k=top_k)
    model.module.set_attn_implementation(_REFERENCE)
    try:
        positions = torch.arange(len(tokens)).unsqueeze(0)
        found = model.module(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False)
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)
    logits: Tensor = found.logits[0].float()
    return logits
