"""Paged attention: the rows of one step against the pages of their sequences. Reads pools in place; never writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backend import DEFAULT, AttentionBackend, AttentionKernel
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVFields, KVReader, LatentFields, PagedField
from quire.kernels.page_arrays import PageArrays
from quire.kernels.sdpa import flash_usable, native_on_cpu, sdpa_flash, sdpa_math
from quire.kernels.segments import MAX_BATCHED, Segment, Source, StepPlan
from quire.kernels.workspace import Workspace

_WIDEN_ROWS = {torch.bfloat16: 16, torch.float16: 1}
"""Rows from which it pays to convert the keys once, if the CPU lacks instructions for their dtype."""

_workspace = Workspace()


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reader: KVReader,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = 0,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output `[T, heads, value_dim]` of every row over the tokens of `reader`, in the dtype of `query`.

    `query` `[T, heads, key_dim]`; `key` `[T, kv_heads, key_dim]` and `value` `[T, kv_heads, value_dim]` are the new
    tokens as the writing function returned them. A row at position p reads keys `p - window < k <= p`; `chunked`, those
    of its own chunk of `window` tokens up to p. `sinks` `[heads]` are logits of an extra key without value.
    """
    kernel = batch.backend.kernel(query, reader)
    if kernel is not None:
        if chunked and window:
            batch.refuse_trees("chunked attention")
        out, _ = kernel.pages(
            *_paged(query, reader, batch),
            scale=scale,
            window=window or 0,
            chunked=chunked and bool(window),
            softcap=softcap,
            sinks=sinks,
        )
        return out
    step = _Step(query, key, value, reader, scale, softcap)
    plan = batch.plan(window or 0, query.device, chunked=chunked)
    if len(plan.segments) == 1 and sinks is None and plan.segments[0].rows == slice(0, query.shape[0]):
        out, _ = step.partial(plan.segments[0])
        return out.reshape(query.shape[0], query.shape[1], -1).to(query.dtype)
    return step.merged(plan, keep_lse=sinks is not None).result(sinks).to(query.dtype)


def paged_attention_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reader: KVReader,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = 0,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` to be merged with more: float32 output `[T, heads, value_dim]` and log-sum-exp `[T, heads]`."""
    kernel = batch.backend.kernel(query, reader)
    if kernel is not None:
        out, lse = kernel.pages(*_paged(query, reader, batch), scale=scale, window=window or 0, keep_lse=True)
        assert lse is not None
        return out, lse
    step = _Step(query, key, value, reader, scale, None)
    merged = step.merged(batch.plan(window or 0, query.device), keep_lse=True)
    return merged.out.flatten(1, 2), merged.lse.flatten(1, 2)


_Paged = tuple[Tensor, Sequence[PagedField | None], PageArrays]


def _paged(query: Tensor, reader: KVReader, batch: PagedBatch) -> _Paged:
    """The arguments of a kernel that reads pages itself."""
    assert isinstance(reader, KVFields | LatentFields)
    query = query if query.stride(2) == 1 else query.contiguous()
    return query, reader.parts(), batch.arrays


def attend_tile(
    query: Tensor,
    reader: KVReader,
    index: Tensor,
    hidden: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: AttentionBackend = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Attention of groups of rows over tokens of their own: output and log-sum-exp. Several rows have one KV head.

    The rows of group g, `query[g]` of `query` `[groups, rows, heads, dim]`, read the tokens in the g-th equal part of
    the slots `index`, int64, except those in `hidden` `[groups, rows, tokens]`. Returns float32 `[groups, rows, heads,
    value_dim]` and `[groups, rows, heads]`; a row that sees no token gives zeros and -inf.
    """
    groups, rows = query.shape[:2]
    kernel = backend.kernel(query, reader, refused="rows that read the same entries" if rows > 1 else "")
    if kernel is None:
        return _tile(query, reader, index, hidden, scale, softcap)
    out, lse = _selected(kernel, query[:, 0], reader, index.view(groups, -1), hidden[:, 0], scale, softcap)
    return out.unsqueeze(1), lse.unsqueeze(1)


def _tile(
    query: Tensor, reader: KVReader, index: Tensor, hidden: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """`attend_tile` by torch's operators."""
    groups, rows, heads, _ = query.shape
    new_key, new_value = reader.gather(index, query.dtype)
    step = _Step(query.flatten(0, 1), new_key, new_value, reader, scale, softcap)
    key, value = (_by_group(found, groups) for found in (new_key, new_value))
    blind = hidden.all(dim=-1)
    mask = torch.zeros(hidden.shape, device=query.device).masked_fill_(hidden & ~blind.unsqueeze(-1), float("-inf"))
    if rows == 1:  # the heads of a KV head are the rows of one product
        out, lse = step.attend(
            query.view(groups, key.shape[1], -1, query.shape[-1]), key, value, mask=mask.unsqueeze(1)
        )
        out, lse = out.reshape(groups, 1, heads, -1), lse.reshape(groups, 1, heads)
    else:
        key, value = (found.expand(-1, heads, -1, -1) for found in (key, value))
        out, lse = step.attend(query.transpose(1, 2), key, value, mask=mask.unsqueeze(1))
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return (
        out.float().masked_fill(blind.view(groups, rows, 1, 1), 0),
        lse.masked_fill(blind.unsqueeze(-1), float("-inf")),
    )


def _by_group(tokens: Tensor, groups: int) -> Tensor:
    """`tokens` `[groups * n, kv_heads, dim]` as `[groups, kv_heads, n, dim]`."""
    return tokens.view(groups, -1, *tokens.shape[1:]).transpose(1, 2)


def attend_selected(
    query: Tensor,
    reader: KVReader,
    slots: Tensor,
    hidden: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: AttentionBackend = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """`attend_tile` if every row has tokens of its own: row i of `query` `[T, heads, dim]` reads `slots[i]`.

    `slots` int64 and `hidden` are `[T, n]`. Returns float32 `[T, heads, value_dim]` and `[T, heads]`.
    """
    kernel = backend.kernel(query, reader)
    if kernel is not None:
        return _selected(kernel, query, reader, slots, hidden, scale, softcap)
    size = max(1, MAX_BATCHED // slots.shape[1])
    parts = []
    for start in range(0, len(slots), size):
        block = slice(start, start + size)
        index, unseen = slots[block].flatten(), hidden[block].unsqueeze(1)
        out, lse = _tile(query[block].unsqueeze(1), reader, index, unseen, scale, softcap)
        parts.append((out[:, 0], lse[:, 0]))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _selected(
    kernel: AttentionKernel,
    query: Tensor,
    reader: KVReader,
    slots: Tensor,
    hidden: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """`attend_selected` by the kernel."""
    assert isinstance(reader, KVFields | LatentFields)
    query = query if query.stride(2) == 1 else query.contiguous()
    return kernel.selected(query, reader.parts(), slots, hidden, scale=scale, softcap=softcap)


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None) -> Tensor:
    """Merges float32 outputs `[..., heads, dim]` over different keys, by their log-sum-exps `[..., heads]`.

    `sinks` `[heads]` as in `paged_attention`. Each row must have seen a key in some part.
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


class _Step:
    """The tensors of one call, and the partial attention of one segment."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, reader: KVReader, scale: float, softcap: float | None
    ) -> None:
        self.query = query.view(query.shape[0], key.shape[1], -1, query.shape[2])  # [T, kv_heads, group, key_dim]
        self.new = (key, value)
        self.reader = reader
        self.scale = scale
        self.softcap = softcap
        self.flash = flash_usable(query, key.shape[-1], value.shape[-1], softcap)
        narrow = self.flash and not native_on_cpu(query.dtype)
        self.widen_from = _WIDEN_ROWS[query.dtype] if narrow else sys.maxsize  # rows
        self._source: Source | None = None
        self._tokens: tuple[Tensor, Tensor] = self.new

    def merged(self, plan: StepPlan, *, keep_lse: bool) -> _Merged:
        """All segments of a plan. Without `keep_lse`, the log-sum-exp of finished rows is not updated."""
        value_dim = self.new[1].shape[-1]
        merged = _Merged(self.query, value_dim, start_empty=plan.start_empty, keep_lse=keep_lse)
        for segment in plan.segments:
            merged.add(segment, *self.partial(segment))
        return merged

    def partial(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """Output `[rows, kv_heads, group, value_dim]` and log-sum-exp `[rows, kv_heads, group]` of one segment."""
        key, value = self._read(segment.source)
        query = self.query[segment.rows]
        if segment.batched:
            return self._batched(query, key, value, segment)
        key, value = key[segment.start : segment.stop], value[segment.start : segment.stop]
        if segment.causal or segment.mask is not None:
            return self._block(query, key, value, segment)
        return self._batched(query, key, value, segment)  # rows that see the same keys, whatever their sequences

    def _batched(self, query: Tensor, key: Tensor, value: Tensor, segment: Segment) -> tuple[Tensor, Tensor]:
        """Equal parts of the rows against as many equal parts of the keys. The rows of a part and the heads of a group
        are the rows of one product."""
        _, kv_heads, group, _ = query.shape
        count, mask = max(1, segment.batched), segment.mask
        key = key.view(count, -1, *key.shape[1:]).transpose(1, 2)  # [count, kv_heads, keys, dim]
        value = value.view(count, -1, *value.shape[1:]).transpose(1, 2)
        rows = query.shape[0] // count
        if mask is not None and rows > 1 and group > 1:
            if segment.folded is None or segment.folded.shape[1] != group * rows:
                segment.folded = mask.repeat(1, group, 1)
            mask = segment.folded
        mask = None if mask is None else mask.unsqueeze(1)
        if rows == 1:
            return self.attend(query, key, value, mask=mask)
        folded = query.view(count, rows, kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out, lse = self.attend(folded, key, value, mask=mask)
        out = out.reshape(count, kv_heads, group, rows, -1).permute(0, 3, 1, 2, 4).flatten(0, 1)
        return out, lse.reshape(count, kv_heads, group, rows).permute(0, 3, 1, 2).flatten(0, 1)

    def _block(self, query: Tensor, key: Tensor, value: Tensor, segment: Segment) -> tuple[Tensor, Tensor]:
        """Rows that see different keys: KV heads are the batch, the heads of a group share keys by stride 0."""
        key, value = (part.transpose(0, 1).unsqueeze(1).expand(-1, query.shape[2], -1, -1) for part in (key, value))
        out, lse = self.attend(query.permute(1, 2, 0, 3), key, value, causal=segment.causal, mask=segment.mask)
        return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Partial attention by the function that supports this case; see `sdpa_flash`."""
        if self.flash:
            if query.shape[-2] >= self.widen_from:
                query, key, value = query.float(), _widened("wide_key", key), _widened("wide_value", value)
            return sdpa_flash(query, key, value, scale=self.scale, causal=causal, mask=mask)
        return sdpa_math(query, key, value, scale=self.scale, causal=causal, mask=mask, softcap=self.softcap)

    def _read(self, source: Source) -> tuple[Tensor, Tensor]:
        """Keys and values `[tokens, kv_heads, dim]` of a source; read once for consecutive segments that share it."""
        if source is self._source:
            return self._tokens
        dtype = self.query.dtype
        if source.new:
            key, value = (new[source.start : source.stop].to(dtype) for new in self.new)
            self._tokens = key, value
        elif source.index is None:
            self._tokens = self.reader.read(source.start, source.stop, dtype)
        else:
            self._tokens = self.reader.gather(source.index, dtype)
        self._source = source
        return self._tokens


class _Merged:
    """Partial results of all rows, merged by log-sum-exp in float32."""

    def __init__(self, query: Tensor, value_dim: int, *, start_empty: bool, keep_lse: bool) -> None:
        """`query` is `[T, kv_heads, group, key_dim]`."""
        shape = query.shape[:3]
        self.out = torch.empty(*shape, value_dim, dtype=torch.float32, device=query.device)
        self.lse = torch.empty(shape, dtype=torch.float32, device=query.device)
        self.keep_lse = keep_lse
        if start_empty:
            self.out.zero_()
            self.lse.fill_(float("-inf"))

    def add(self, segment: Segment, out: Tensor, lse: Tensor) -> None:
        """Merge one segment's part into its rows."""
        rows = segment.rows
        if segment.first:
            self.out[rows] = out.float()
            if self.keep_lse or not segment.last:
                self.lse[rows] = lse
            return
        before, merged = self.lse[rows], self.out[rows]  # copies if `rows` is an index
        weight = torch.sigmoid(lse - before).unsqueeze(-1)
        self.out[rows] = torch.lerp(merged, out.float(), weight)
        if self.keep_lse or not segment.last:
            self.lse[rows] = torch.logaddexp(before, lse)

    def result(self, sinks: Tensor | None) -> Tensor:
        """`[T, heads, value_dim]`; a sink adds to the weight of every row and has no value."""
        if sinks is not None:
            self.out.mul_(torch.sigmoid(self.lse - sinks.float().view(self.lse.shape[1:])).unsqueeze(-1))
        return self.out.flatten(1, 2)


def _widened(name: str, tokens: Tensor) -> Tensor:
    """`tokens` `[..., keys, dim]` in float32; dimensions expanded by stride 0 are converted once."""
    shape = tokens.shape
    narrow = tokens[:, :1] if tokens.stride(1) == 0 else tokens
    wide = _workspace.take(name, torch.float32, tokens.device, *narrow.shape)
    return wide.copy_(narrow).expand(shape)
