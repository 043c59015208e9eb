"""Rotary embeddings whose angles would depend on the batch are fixed once per deployment."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import UnsupportedModel


def fix_longrope(model: torch.nn.Module, max_length: int) -> int:
    """Make `longrope` modules of `model` use one set of factors for every batch; returns how many there were.

    They would choose the long or the short factors by the longest position in the batch. Here the deployment's
    `max_length` (tokens) chooses: long if it exceeds the length the model was first trained on, else short.
    """
    fixed = 0
    for module in model.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict) and "longrope" in rope_type.values():
            raise UnsupportedModel(f"{type(model).__name__} has longrope for some kinds of layers only.")
        if rope_type != "longrope":
            continue
        config: Any = module.config
        original = int(config.rope_parameters["original_max_position_embeddings"])
        inv_freq: Any = module.inv_freq
        length = original + 1 if max_length > original else original
        chosen, _ = ROPE_INIT_FUNCTIONS["longrope"](config, inv_freq.device, seq_len=length)
        inv_freq.copy_(chosen)
        setattr(module, "rope_type", "default")  # noqa: B010 (modules type every attribute as Tensor or Module)
        fixed += 1
    return fixed
