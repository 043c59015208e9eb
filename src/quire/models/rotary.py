"""Rotary embeddings whose angles would depend on the batch are fixed once per deployment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def fix_rotary(model: torch.nn.Module, max_length: int) -> int:
    """Make rotary modules of `model` use one set of angles for every batch; returns how many sets there were to fix.

    Two variants would read the longest position of the batch, so that a request's output depended on its neighbours.
    Here both use the angles that transformers gives a sequence of the deployment's `max_length` tokens, also for
    shorter ones. So outputs differ from what transformers gives for a shorter sequence alone:

    - `longrope`: the long factors if `max_length` exceeds the length the model was first trained on, else the short.
    - `dynamic` (NTK): the base stretched for `max_length` if that exceeds `max_position_embeddings`, else unchanged.

    Kinds of layers with rotary embeddings of their own are fixed one by one.
    """
    fixed = 0
    for module, kind, variant in _variants(model):
        if variant in ("longrope", "dynamic"):
            _fix(module, variant, max_length, kind)
            if kind is None:
                module.rope_type = "default"
            else:
                module.rope_type[kind] = "default"
            fixed += 1
    return fixed


def grows_with_length(model: torch.nn.Module) -> bool:
    """Whether angles follow the length, so that a deployment may be longer than `max_position_embeddings`."""
    return any(variant == "dynamic" for _, _, variant in _variants(model))


def _variants(model: torch.nn.Module) -> Iterator[tuple[Any, str | None, str]]:
    """(module, kind of layers, variant) of all rotary embeddings; the kind is None if a module has one variant."""
    for module in model.modules():
        found: Any = getattr(module, "rope_type", None)
        if isinstance(found, dict):
            yield from ((module, kind, variant) for kind, variant in list(found.items()))
        elif found is not None:
            yield module, None, found


def _fix(module: Any, variant: str, max_length: int, kind: str | None) -> None:
    """Set the frequencies of `module` to those of `max_length`; if it has several kinds, only those of `kind`."""
    config = module.config
    buffer: Tensor = module.inv_freq if kind is None else getattr(module, f"{kind}_inv_freq")
    if variant == "dynamic":
        if max_length <= config.max_position_embeddings:
            return  # the initial value, whose base some models choose themselves
        length = max_length
    else:
        parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
        original = int(parameters["original_max_position_embeddings"])
        length = original + 1 if max_length > original else original
    of_kind = {} if kind is None else {"layer_type": kind}
    chosen, _ = ROPE_INIT_FUNCTIONS[variant](config, buffer.device, seq_len=length, **of_kind)
    buffer.copy_(chosen)
