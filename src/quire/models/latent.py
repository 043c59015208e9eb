"""Multi-head latent attention (MLA) over stored latents: one latent and one rotary key per token, for all heads.

The model's own code expands each latent to the keys and values of every head. Two ways give the same output, up to
rounding:

- absorbed: the expansion of keys is applied to the query and that of values to the output, so that attention itself
  reads latents, as one head. Its extra cost per step does not depend on the context.
- expanded: the model's own way, on latents read back from the pool. Keys are narrower, so many rows of one sequence
  cost less once its context is expanded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import UnsupportedModel
from quire.kernels.attention import paged_attention
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import LatentFields
from quire.kernels.slots import Slots
from quire.models.attention import OWN_ATTENTION, CallOptions
from quire.models.forward import Forward, RecordingForward, in_forward
from quire.spec.layers import LatentCall
from quire.upload import to_device

MIN_EXPANDED_ROWS = 16
"""Rows of one sequence from which expanding its context may be faster."""


def install_latents(model: torch.nn.Module) -> None:
    """Let the latent attention modules of `model` store latents in the pools."""
    for module in model.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            attention = LatentAttention(module)
            setattr(module, OWN_ATTENTION, attention)
            setattr(module, "expand_kv", attention.expand_outside)  # noqa: B010 (modules type attributes as Tensor)


class LatentAttention:
    """Latent attention of one module, on views of the module's own weights."""

    def __init__(self, module: Any) -> None:
        self._expand = module.expand_kv
        self._expansion = module.kv_b_proj
        self._key_dim = int(module.qk_nope_head_dim)
        self.value_dim = int(module.v_head_dim)
        self.rank = int(module.kv_lora_rank)
        if module.kv_b_proj.bias is not None:
            raise UnsupportedModel(f"{type(module).__name__} expands latents with a bias, which is not known here.")

    def expand_outside(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """In place of `expand_kv`: in a forward pass on the pools, latents are not expanded."""
        if in_forward():
            return latent, rope
        key, value = self._expand(latent, rope)
        return key, value

    def __call__(self, forward: Forward, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Tensor:
        """`key` `[T, 1, rank]` are latents and `value` `[T, 1, rope_dim]` rotated keys; see `OwnAttention`."""
        if options.window:
            raise UnsupportedModel(f"a window of {options.window} tokens slides over latents, which is not held here.")
        kept = self.keep(forward, key, value)
        if kept is None:
            return query.new_zeros(*query.shape[:2], self.value_dim)
        return self.attend(query, *kept, options)

    def keep(
        self, forward: Forward, key: Tensor, value: Tensor, *, sparse: bool = False, index_dim: int = 0
    ) -> tuple[LatentFields, PagedBatch] | None:
        """Store the data of a module as that of the current call: its fields and its batch. None in a dry run, which
        records the call."""
        latent, rope = key[:, 0], value[:, 0]
        if isinstance(forward, RecordingForward):
            rank, rope_dim = latent.shape[-1], rope.shape[-1]
            forward.note(LatentCall(rank=rank, rope_dim=rope_dim, sparse=sparse, index_dim=index_dim))
            return None
        fields, batch = forward.latents(forward.next_ordinal())
        fields.write(batch.places_on(latent.device), latent, rope)
        return fields, batch

    def attend(self, query: Tensor, fields: LatentFields, batch: PagedBatch, options: CallOptions) -> Tensor:
        """Output `[T, heads, value_dim]` of `query` `[T, heads, dim]`, rows of `batch` whose new tokens are written."""
        kind = (type(self), self.rank, self._key_dim, self.value_dim)
        device = query.device  # alone: what is derived is kept for later steps, and would keep the query
        parts = batch.derived(kind, lambda batch: self._parts(batch, device))
        out = query.new_zeros(*query.shape[:2], self.value_dim)
        for at, part, expanded in parts:
            own = query[at]
            if expanded:
                reader = _ExpandedLatents(self, fields)
                out[at] = paged_attention(own, reader, part, options)
            else:
                own = self.absorb(own)
                out[at] = self.release(paged_attention(own, fields, part, options))
        return out

    def _parts(self, batch: PagedBatch, device: torch.device) -> list[tuple[Tensor, PagedBatch, bool]]:
        """The rows of sequences that are cheaper absorbed and of those cheaper expanded, each with their batch."""
        new = np.diff(batch.query_starts).astype(np.int64)
        expanded = self.expands(new, batch.context_lens.astype(np.int64))
        found = []
        for way in (False, True):
            sequences = np.flatnonzero((expanded == way) & (new > 0))
            if len(sequences):
                rows, part = batch.part(sequences)
                found.append((to_device(rows, device), part, way))
        return found

    def expands(self, new: Slots, contexts: Slots) -> npt.NDArray[np.bool_]:
        """Whether `new` rows of one sequence cost fewer products if its context of so many tokens is expanded."""
        saved = (2 * self.rank - self._key_dim - self.value_dim) * new * (contexts - new // 2)
        spent = self.rank * (self._key_dim + self.value_dim) * (contexts - new)
        return (new >= MIN_EXPANDED_ROWS) & (saved > spent)

    def absorb(self, query: Tensor) -> Tensor:
        """`query` `[T, heads, dim]` in a form that scores latents and rotary keys: `[T, heads, rank + rope_dim]`."""
        plain, rotated = query[..., : self._key_dim], query[..., self._key_dim :]
        keys = self._heads()[:, : self._key_dim]  # [heads, key_dim, rank]
        absorbed = torch.matmul(plain.transpose(0, 1).to(keys.dtype), keys).transpose(0, 1)
        return torch.cat((absorbed.to(query.dtype), rotated), dim=-1)

    def release(self, out: Tensor) -> Tensor:
        """Attention's output over latents and rotary keys, `[T, heads, rank + rope_dim]`, as values of each head."""
        out = out[..., : self.rank]
        values = self._heads()[:, self._key_dim :]  # [heads, value_dim, rank]
        return torch.matmul(out.transpose(0, 1).to(values.dtype), values.transpose(1, 2)).transpose(0, 1).to(out.dtype)

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[n, heads, dim]` and values `[n, heads, value_dim]` of `rows` `[n, 1, rank + rope_dim]`, by the model's
        own code."""
        rows = rows[None, None, :, 0]
        key, value = self._expand(rows[..., : self.rank], rows[..., self.rank :])
        return key[0].transpose(0, 1), value[0].transpose(0, 1)

    def _heads(self) -> Tensor:
        """The expansion per head, `[heads, key_dim + value_dim, rank]`."""
        weight: Tensor = self._expansion.weight
        return weight.view(-1, self._key_dim + self.value_dim, self.rank)


class _ExpandedLatents:
    """Keys and values of all heads, computed from latents when they are read."""

    def __init__(self, attention: LatentAttention, fields: LatentFields) -> None:
        self._attention = attention
        self._fields = fields

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._attention.expand(self._fields.gather(index, dtype)[0])
