"""Paged attention: the rows of one step against the pages of their sequences. Reads pools; never writes.

One call of the device's kernel (`backend`) computes all rows; without a kernel, `reference` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import DEFAULT, AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVFields, KVReader, PagedField
from quire.kernels.terms import AttentionTerms


def paged_attention(query: Tensor, reader: KVReader, batch: PagedBatch, terms: AttentionTerms) -> Tensor:
    """Attention output `[T, heads, value_dim]` of every row over the tokens of `reader`, in the dtype of `query`.

    `query` is `[T, heads, key_dim]`; the step's own tokens are written.
    """
    if terms.chunked:
        batch.refuse_trees("chunked attention")
    kernel = batch.backend.kernel(query, reader)
    if kernel is not None:
        return kernel.pages(*_paged(query, reader, batch), terms)[0]
    out, lse = reference.attend_pages(query, reader, batch, terms)
    if terms.sinks is not None:
        out = out * torch.sigmoid(lse - terms.sinks.float()).unsqueeze(-1)
    return out.to(query.dtype)


def paged_attention_lse(
    query: Tensor, reader: KVReader, batch: PagedBatch, terms: AttentionTerms
) -> tuple[Tensor, Tensor]:
    """`paged_attention` without sinks, to be merged with more: float32 output `[T, heads, value_dim]` and log-sum-exp
    `[T, heads]`."""
    kernel = batch.backend.kernel(query, reader)
    if kernel is None:
        return reference.attend_pages(query, reader, batch, terms)
    out, lse = kernel.pages(*_paged(query, reader, batch), terms, keep_lse=True)
    assert lse is not None
    return out, lse


_Paged = tuple[Tensor, Sequence[PagedField | None], PagedBatch]


def _paged(query: Tensor, reader: KVReader, batch: PagedBatch) -> _Paged:
    """The arguments of a kernel that reads pages itself."""
    assert isinstance(reader, KVFields)
    query = query if query.stride(2) == 1 else query.contiguous()
    return query, reader.parts(), batch


def attend_tile(
    query: Tensor,
    reader: KVReader,
    index: Tensor,
    hidden: Tensor,
    terms: AttentionTerms,
    backend: AttentionBackend = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Attention of groups of rows over tokens of their own: output and log-sum-exp. Several rows have one KV head.

    The rows of group g, `query[g]` of `query` `[groups, rows, heads, dim]`, read the tokens in the g-th equal part of
    the slots `index`, int64, except those in `hidden` `[groups, rows, tokens]`; of `terms`, scale and softcap count.
    Returns float32 `[groups, rows, heads, value_dim]` and `[groups, rows, heads]`; a row that sees no token gives zeros
    and -inf.
    """
    groups, rows = query.shape[:2]
    kernel = backend.kernel(query, reader, refused="rows that read the same entries" if rows > 1 else "")
    if kernel is None:
        return reference.attend_selected(query, reader, index, hidden, terms)
    assert isinstance(reader, KVFields)
    own = query[:, 0] if query.stride(3) == 1 else query[:, 0].contiguous()
    out, lse = kernel.selected(own, reader.parts(), index.view(groups, -1), hidden[:, 0], terms)
    return out.unsqueeze(1), lse.unsqueeze(1)


def attend_selected(
    query: Tensor,
    reader: KVReader,
    slots: Tensor,
    hidden: Tensor,
    terms: AttentionTerms,
    backend: AttentionBackend = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """`attend_tile` if every row has tokens of its own: row i of `query` `[T, heads, dim]` reads `slots[i]`.

    `slots` int64 and `hidden` are `[T, n]`. Returns float32 `[T, heads, value_dim]` and `[T, heads]`.
    """
    out, lse = attend_tile(query.unsqueeze(1), reader, slots.flatten(), hidden.unsqueeze(1), terms, backend)
    return out[:, 0], lse[:, 0]


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None) -> Tensor:
    """Merges float32 outputs `[..., heads, dim]` over different keys, by their log-sum-exps `[..., heads]`.

    `sinks` `[heads]` as in `AttentionTerms`. Each row must have seen a key in some part.
    """
    scores = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(scores, dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float().expand_as(total))
    weights = torch.exp(scores - total).unsqueeze(-1)
    merged = torch.zeros_like(parts[0][0])
    for weight, (out, _) in zip(weights, parts, strict=True):
        merged.addcmul_(weight, out)
    return merged
