"""Linear layers of half precision on processors that have no instructions for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels.sdpa import native_on_cpu

_BARE = ("dt_proj",)
"""Linear layers whose weight the surrounding code multiplies itself: the small one for step sizes of Mamba 1."""


def widen_linears(model: torch.nn.Module) -> int:
    """Convert the weights of `model`'s linear layers to float32 if the CPU has no native products of their dtype.

    Inputs and outputs keep their dtype, and results are those of the narrow product, which accumulates in float32 too.
    It is 5 to 10 times faster and uses twice the memory. Embeddings that share a weight with a layer keep their own
    copy. Returns the number of layers changed; none on other devices.
    """
    widened = 0
    for name, module in model.named_modules():
        if name.endswith(_BARE) or type(module) is not torch.nn.Linear or module.weight.device.type != "cpu":
            continue
        if native_on_cpu(module.weight.dtype):
            continue
        module.weight = torch.nn.Parameter(module.weight.detach().float(), requires_grad=False)
        if module.bias is not None:
            module.bias = torch.nn.Parameter(module.bias.detach().float(), requires_grad=False)
        layer: Any = module
        layer.forward = partial(_wide_linear, layer)
        widened += 1
    return widened


def _wide_linear(layer: torch.nn.Linear, rows: Tensor) -> Tensor:
    return torch.nn.functional.linear(rows.float(), layer.weight, layer.bias).to(rows.dtype)
