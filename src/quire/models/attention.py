"""The attention function that Hugging Face models call instead of their own, and the forward pass it belongs to.

States of the context variable: unset (a call is an error), recording (calls are described and answered with zeros, no
pool exists yet), running (keys and values go to the pool and attention reads it). The pool is keyed by the ordinal of
the call within the forward pass: layers may share a module, and a module may be called twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from quire.errors import UnsupportedModel
from quire.kernels.attention import PagedBatch, paged_attention
from quire.kernels.state import StateBatch
from quire.kernels.write import write_slots
from quire.memory.pool import Pool
from quire.spec.layers import AttentionCall

IMPLEMENTATION = "quire"
"""Name under which the function is registered; no mask function goes with it, so models build no masks."""


class RunningForward:
    """One forward pass on the pools: `pools[i]` holds the frames of group i and `batches[i]` says which to use."""

    def __init__(self, pools: Sequence[Pool], batches: Sequence[PagedBatch | StateBatch]) -> None:
        self._groups = tuple(zip(pools, batches, strict=True))
        self.ordinal = 0

    def next_ordinal(self) -> int:
        """The ordinal of the call that begins now."""
        ordinal, self.ordinal = self.ordinal, self.ordinal + 1
        return ordinal

    def paged(self, name: str, ordinal: int) -> tuple[Tensor, PagedBatch]:
        """The pool's layer of a field with entries per token, and the batch of its group."""
        layer, batch = self._find(name, ordinal)
        assert isinstance(batch, PagedBatch)
        return layer, batch

    def states(self, name: str, ordinal: int) -> tuple[Tensor, StateBatch]:
        """The pool's layer of a field of states, and the batch of its group."""
        layer, batch = self._find(name, ordinal)
        assert isinstance(batch, StateBatch)
        return layer, batch

    def _find(self, name: str, ordinal: int) -> tuple[Tensor, PagedBatch | StateBatch]:
        for pool, batch in self._groups:
            if pool.has(name, ordinal):
                return pool.layer(name, ordinal), batch
        raise AssertionError(f"call {ordinal} of the forward pass keeps no '{name}'")

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, scale: float, extras: dict[str, Any]
    ) -> Tensor:
        """Store the new keys and values at their slots and attend: `[T, heads, value_dim]`."""
        ordinal = self.next_ordinal()
        key_pool, batch = self.paged("k", ordinal)
        value_pool, _ = self.paged("v", ordinal)
        slots = batch.slots_on(query.device)
        write_slots(key_pool, slots, key)
        write_slots(value_pool, slots, value)
        return paged_attention(
            query, key, value, key_pool, value_pool, batch, scale=scale, window=call.window, **extras
        )


class RecordingForward:
    """A dry run that finds out which attention calls a forward pass makes."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, scale: float, extras: dict[str, Any]
    ) -> Tensor:
        """Note the call; the output is zeros."""
        self.calls.append(call)
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


_forward: ContextVar[RunningForward | RecordingForward | None] = ContextVar("quire_forward", default=None)


@contextmanager
def forward_pass(forward: RunningForward | RecordingForward) -> Iterator[None]:
    """Calls of the attention function inside belong to `forward`."""
    token = _forward.set(forward)
    try:
        yield
    finally:
        _forward.reset(token)


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
    forward = _forward.get()
    if forward is None:
        raise RuntimeError("the attention implementation 'quire' runs only inside LoadedModel.forward")
    for name in ("indices", "block_indices"):
        if others.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} selects tokens with an indexer, which is not held here.")
    call = AttentionCall(
        kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3], window=int(sliding_window or 0)
    )
    out = forward.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        call,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        {"softcap": softcap, "sinks": s_aux},
    )
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attention)
