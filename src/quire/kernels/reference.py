"""Attention by torch's operators, on any device: gather the keys and values of some rows, then one product for all.

It computes what no kernel computes: on a machine without a compiler, of readers that are no stored fields, and what a
kernel has no function for. Every tile of a step reads all its keys, also those that another tile has read.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVReader
from quire.kernels.terms import AttentionTerms
from quire.kernels.tiles import Tile, tiles_of

MOST_TOKENS = 4096
"""Tokens gathered at once for several sequences: few enough to stay in a CPU's cache until they are read."""
MOST_PAIRS = 1 << 22
"""Pairs of a row and a token in one tile: the bytes of what says which tokens are visible."""
MOST_SCORES = 1 << 24
"""Scores that are computed at once, float32, unless those of one row are more."""


def attend_pages(query: Tensor, reader: KVReader, batch: PagedBatch, terms: AttentionTerms) -> tuple[Tensor, Tensor]:
    """Float32 output `[T, heads, value_dim]` and log-sum-exp `[T, heads]` of `query` `[T, heads, key_dim]` over the
    tokens of its sequences; see `paged_attention_lse`."""
    # Alone: what is derived is kept for later steps, and would keep the query and sinks.
    device, window, chunked = query.device, terms.window, terms.chunked
    tiles = batch.derived(("seen", window, chunked), lambda batch: _tiles(batch, window, chunked, device))
    parts = [attend(query[tile.rows], reader, tile.slots, ~tile.visible, terms) for tile in tiles]
    out, lse = (query.new_empty(*query.shape[:2], *part.shape[3:], dtype=torch.float32) for part in parts[0])
    for tile, found in zip(tiles, parts, strict=True):
        out[tile.rows], lse[tile.rows] = found
    return out, lse


def _tiles(batch: PagedBatch, window: int, chunked: bool, device: torch.device) -> list[Tile]:
    return tiles_of(
        batch,
        np.arange(len(batch.context_lens)),
        1,
        device,
        window=window,
        chunked=chunked,
        most_pairs=MOST_PAIRS,
        most_entries=MOST_TOKENS,
    )


def attend_selected(
    query: Tensor, reader: KVReader, slots: Tensor, hidden: Tensor, terms: AttentionTerms
) -> tuple[Tensor, Tensor]:
    """Attention of groups of rows over tokens of their own; see `attention.attend_tile`."""
    groups = len(query)
    size = max(1, MOST_TOKENS * groups // max(len(slots), 1))
    per = len(slots) // groups
    parts = []
    for start in range(0, groups, size):
        block = slice(start, start + size)
        index, unseen = slots[start * per : (start + size) * per], hidden[block]
        blind = unseen.all(dim=-1, keepdim=True)  # a row that sees no token would give NaN
        out, lse = attend(query[block], reader, index, unseen & ~blind, terms)
        parts.append((out.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, float("-inf"))))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def attend(
    query: Tensor, reader: KVReader, slots: Tensor, hidden: Tensor, terms: AttentionTerms
) -> tuple[Tensor, Tensor]:
    """Attention of `query` `[groups, rows, heads, key_dim]` over the tokens in as many equal parts of `slots`.

    A row does not see the tokens in `hidden` `[groups, rows, tokens]`, and must see one. Returns float32 `[groups,
    rows, heads, value_dim]` and the log-sum-exp of the scores, `[groups, rows, heads]`.
    """
    groups, rows, heads, _ = query.shape
    key, value = (part.view(groups, -1, *part.shape[1:]) for part in reader.gather(slots, query.dtype))
    key, value = (part.transpose(1, 2).float() for part in (key, value))  # [groups, kv_heads, tokens, dim]
    size = max(1, MOST_SCORES // (groups * heads * key.shape[2]))
    parts = [
        _attend(query[:, start : start + size], key, value, hidden[:, start : start + size], terms)
        for start in range(0, rows, size)
    ]
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, terms: AttentionTerms) -> tuple[Tensor, Tensor]:
    """`attend` of some rows. The rows of a group and the heads of a KV head are the rows of one product."""
    groups, rows, heads, _ = query.shape
    shape = (groups, key.shape[1], heads // key.shape[1], rows)
    folded = query.transpose(1, 2).float().reshape(*shape[:2], shape[2] * rows, -1)
    scores = torch.matmul(folded, key.transpose(2, 3)).mul_(terms.scale).view(*shape, -1)
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    scores = scores.masked_fill_(hidden[:, None, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_().flatten(2, 3)
    out = torch.matmul(weights, value).view(groups, heads, rows, -1)
    return out.transpose(1, 2), lse.view(groups, heads, rows).transpose(1, 2)
