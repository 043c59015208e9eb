"""Layers that read the keys and values of an earlier layer and keep none of their own (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.attention import OWN_ATTENTION, AttentionOptions, KeptKeys, keep
from quire.models.forward import RecordingForward, RunningForward


def install_sharing(model: torch.nn.Module) -> int:
    """Let the sharing layers of `model` read what the storing layer of their kind kept; returns how many share."""
    found = 0
    for module in model.modules():
        if getattr(module, "is_kv_shared_layer", False):
            setattr(module, OWN_ATTENTION, _ReadingAttention(str(module.layer_type)))
            found += 1
        elif getattr(module, "store_full_length_kv", False):
            setattr(module, OWN_ATTENTION, _StoringAttention(str(module.layer_type)))
    return found


class _StoringAttention:
    """Attention whose keys and values later layers of the same kind read again."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(
        self,
        forward: RunningForward | RecordingForward,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """See `OwnAttention`."""
        kept = forward.shared[self._kind] = keep(forward, key, value, options)
        return kept.attend(query, options)


class _ReadingAttention:
    """Attention over what the storing layer of its kind kept. It writes nothing and is no call of its own."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(
        self,
        forward: RunningForward | RecordingForward,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """See `OwnAttention`. `key` and `value` are the storing layer's, as it computed them."""
        kept: KeptKeys = forward.shared[self._kind]
        return kept.attend(query, options)
