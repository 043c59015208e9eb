"""The forward pass of a Mamba-1 layer over pieces that begin with a state, on the module's own weights.

transformers computes several tokens of such a layer from zeros, whatever came before; everything else of its layer is
computed here as it does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear, softplus

from quire.kernels.selective_scan import selective_scan
from quire.models.mixer_cache import MixerStates

SCAN = "mamba_selective_scan"
"""Name of the function that the forward pass of such a layer calls in transformers."""


def selective_mixer(layer: Any, rows: Tensor, states: MixerStates) -> Tensor:
    """Outputs `[pieces, S, hidden]` of `layer` for `rows` of the same shape; `states` are moved on by S tokens."""
    assert states.ssm is not None
    inputs, gate = layer.in_proj(rows).chunk(2, dim=-1)
    inputs = _convolve(layer, inputs.transpose(1, 2), states).transpose(1, 2)
    rank, size = layer.time_step_rank, layer.ssm_state_size
    step, key, query = torch.split(layer.x_proj(inputs), [rank, size, size], dim=-1)
    if hasattr(layer, "dt_layernorm"):  # Jamba and Falcon-Mamba
        step, key, query = layer.dt_layernorm(step), layer.b_layernorm(key), layer.c_layernorm(query)
    weight, bias = layer.dt_proj.weight, layer.dt_proj.bias
    steps = linear(step.to(weight.dtype), weight).float()
    steps = softplus(steps if bias is None else steps + bias.float())
    rates = -torch.exp(layer.A_log.float())
    out, states.ssm = selective_scan(inputs, steps, rates, key, query, states.ssm)
    out = (out + inputs * layer.D.float()) * torch.nn.functional.silu(gate)
    result: Tensor = layer.out_proj(out.to(rows.dtype))
    return result


def _convolve(layer: Any, inputs: Tensor, states: MixerStates) -> Tensor:
    """The causal convolution of `inputs` `[pieces, channels, S]` and its activation."""
    convolution = layer.conv1d
    seen = states.update_conv_state(inputs, layer.layer_idx)
    out = conv1d(seen, convolution.weight, convolution.bias, groups=convolution.groups)
    activated: Tensor = layer.act(out)
    return activated
