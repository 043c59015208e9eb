"""The attention function that Hugging Face models call instead of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from quire.errors import UnsupportedModel
from quire.kernels.attention import attend_selected, merge_attention, paged_attention
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVFields
from quire.kernels.page_bounds import PageBounds
from quire.kernels.terms import AttentionTerms
from quire.models.forward import Forward, ProbingForward, RecordingForward, RunningForward, current_forward
from quire.models.indexers import split_decoding
from quire.spec.layers import AttentionCall

IMPLEMENTATION = "quire"
"""Name under which the function is registered; no mask function goes with it, so models build no masks."""

OWN_ATTENTION = "attention_on_pools"
"""Attribute of an attention module that does more than store its keys and values and read them: an `OwnAttention`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions(AttentionTerms):
    """The terms of one call, and `others` that its module gave."""

    others: Mapping[str, Any]


class OwnAttention(Protocol):
    """The attention of one module."""

    def __call__(self, forward: Forward, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Tensor:
        """Store the new data of the T rows and return the output `[T, heads, value_dim]`; in a dry run of any value.

        `query` is `[T, heads, dim]`; `key` and `value` are those of the module, rows first.
        """


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
    """Called by models: `query` `[1, heads, T, dim]`, `key` and `value` `[1, kv_heads, T, dim]`, rotated already."""
    options = CallOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=int(sliding_window or 0),
        softcap=softcap,
        sinks=s_aux,
        others=others,
    )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(module, query, key, value, options).unsqueeze(0), None


def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Tensor:
    """Output `[T, heads, value_dim]` of the attention of `module`: `query` `[T, heads, dim]`, `key` and `value` `[T,
    kv_heads, dim]`, rotated already."""
    attention: OwnAttention | None = getattr(module, OWN_ATTENTION, None)
    if attention is None:
        others = options.others
        if others.get("indices") is not None or others.get("block_indices") is not None:
            raise UnsupportedModel(f"{type(module).__name__} selects tokens with an indexer, which is not held here.")
        attention = _plain_attention
    forward = current_forward()
    if isinstance(forward, RecordingForward):
        out = attention(forward, query, key, value, options)
        if isinstance(forward, ProbingForward) and attention is _plain_attention:
            out = forward.attend(query, key, value, options)
        return out
    return forward.attend(lambda running: attention(running, query, key, value, options))


def _plain_attention(forward: Forward, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Tensor:
    kept = keep(forward, key, value, options)
    bounds = forward.page_bounds(forward.ordinal - 1) if isinstance(forward, RunningForward) else None
    if bounds is None:
        return kept.attend(query, options)
    assert isinstance(forward, RunningForward)
    return _attend_pages(forward, query, key, value, kept, bounds, options)


def _attend_pages(
    forward: RunningForward,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: KeptKeys,
    bounds: tuple[PageBounds, PagedBatch],
    options: CallOptions,
) -> Tensor:
    """Attention of the last call, whose keys are in host memory: rows that decode read tokens of selected pages, in hot
    buffers, which is lossy, and others read everything."""
    assert forward.hisparse is not None and kept.fields is not None and kept.batch is not None
    ordinal, hisparse, (page_bounds, bounds_batch) = forward.ordinal - 1, forward.hisparse, bounds
    page_bounds.write(bounds_batch, kept.key)
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    decoding, others = split_decoding(kept.batch, query.device)
    if decoding is not None:
        (at, part), own = decoding, split_decoding(bounds_batch, query.device)[0]
        assert own is not None
        hot = KVFields(*(forward.hot_rows(name, ordinal) for name in ("k", "v")))
        hot.write(hisparse.newest(part), key[at], value[at])
        positions = page_bounds.select(query[at], own[1], hisparse.top_k // part.page_size, options.scale)
        swapped = hisparse.swap_in(ordinal, part, positions.int().cpu().numpy())
        found = attend_selected(query[at], hot, swapped.slots, swapped.hidden, options, part.backend)
        out[at] = merge_attention([found], options.sinks).to(query.dtype)
    if others is not None:
        at, part = others
        out[at] = replace(kept, batch=part).attend(query[at], options)
    return out


@dataclass(frozen=True, slots=True)
class KeptKeys:
    """The keys and values of one call, the step's new ones among them. In a dry run nothing is stored."""

    key: Tensor  # [T, kv_heads, dim], the new ones as a reader of the pool sees them
    value_dim: int
    fields: KVFields | None = None
    batch: PagedBatch | None = None

    def attend(self, query: Tensor, options: CallOptions) -> Tensor:
        """Output `[T, heads, value_dim]` of `query` `[T, heads, dim]`; zeros in a dry run."""
        if self.fields is None or self.batch is None:
            return query.new_zeros(*query.shape[:2], self.value_dim)
        return paged_attention(query, self.fields, self.batch, options)


def keep(forward: Forward, key: Tensor, value: Tensor, options: CallOptions, *, index_dim: int = 0) -> KeptKeys:
    """Store the new keys and values, `[T, kv_heads, dim]`, as those of the call that begins now.

    `index_dim` is the width of its indexer's keys, which the indexer stores itself.
    """
    if isinstance(forward, RecordingForward):
        forward.note(
            AttentionCall(
                kv_heads=key.shape[1],
                key_dim=key.shape[2],
                value_dim=value.shape[2],
                window=options.window,
                chunked=options.chunked,
                index_dim=index_dim,
            )
        )
        return KeptKeys(key, value.shape[2])
    ordinal = forward.next_ordinal()
    keys, batch = forward.rows("k", ordinal)
    values, _ = forward.rows("v", ordinal)
    fields = KVFields(keys, values)
    written, _ = fields.write(batch.places_on(key.device), key, value)
    return KeptKeys(written, value.shape[2], fields, batch)


def install_kv_sharing(model: torch.nn.Module) -> None:
    """Let layers without keys of their own read those of an earlier layer of their kind (Gemma 3n, Gemma 4)."""
    for module in model.modules():
        reads = getattr(module, "is_kv_shared_layer", False)
        if reads or getattr(module, "store_full_length_kv", False):
            setattr(module, OWN_ATTENTION, _SharedAttention(str(module.layer_type), keeps=not reads))


class _SharedAttention:
    """Attention over keys and values that several layers of a `kind` read. The first one stores them; the others are no
    calls of their own."""

    def __init__(self, kind: str, *, keeps: bool) -> None:
        self._kind = kind
        self._keeps = keeps

    def __call__(self, forward: Forward, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Tensor:
        if self._keeps:
            forward.shared[self._kind] = keep(forward, key, value, options)
        kept: KeptKeys = forward.shared[self._kind]
        return kept.attend(query, options)


AttentionInterface.register(IMPLEMENTATION, _attention)
