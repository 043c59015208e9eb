"""Hidden states of a target that a draft head reads, kept by hooks of the modules that return them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from quire.errors import UnsupportedModel
from quire.models.forward import HIDDEN, LAST_HIDDEN, current_forward, in_forward


def capture_hidden(decoder: nn.Module, layers: Sequence[int], name: str) -> None:
    """Keep the outputs of these layers of `decoder`, or its own, in each forward pass on the pools.

    Raises UnsupportedModel, before any is kept, if `decoder` has no such layer.
    """
    found: Any = getattr(decoder, "layers", ())
    absent = [layer for layer in layers if layer != LAST_HIDDEN and not 0 <= layer < len(found)]
    if absent:
        raise UnsupportedModel(
            f"the head reads the output of layer {absent[0]}, and '{name}' has {len(found)} layers.",
            fix="use a head that was trained for this target.",
        )
    for layer in layers:
        module = decoder if layer == LAST_HIDDEN else found[layer]
        module.register_forward_hook(partial(_keep, layer))


def _keep(layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
    del module, inputs
    if in_forward():
        states: Tensor = output if isinstance(output, Tensor) else output[0]
        current_forward().shared.setdefault(HIDDEN, {})[layer] = states[0]
