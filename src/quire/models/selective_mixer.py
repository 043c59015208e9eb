"""The forward pass of Mamba-1 layers over pieces that begin with a state, on the modules' own weights.

transformers computes several tokens of such a layer from zeros, whatever came before; everything else of its layers is
computed here as it does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear, silu, softplus

from quire.kernels.selective_scan import selective_scan
from quire.models.mixer_cache import States


def selective_mixer(layer: Any, rows: Tensor, states: States, positions: Tensor | None) -> Tensor:
    """Outputs `[pieces, S, hidden]` of a layer of Mamba, Falcon-Mamba or Jamba for `rows` of the same shape."""
    inputs, gate = layer.in_proj(rows).chunk(2, dim=-1)
    inputs = _convolve(layer, inputs, states)
    rank, size = layer.time_step_rank, layer.ssm_state_size
    step, key, query = torch.split(layer.x_proj(inputs), [rank, size, size], dim=-1)
    if hasattr(layer, "dt_layernorm"):  # Jamba and Falcon-Mamba
        step, key, query = layer.dt_layernorm(step), layer.b_layernorm(key), layer.c_layernorm(query)
    weight, bias = layer.dt_proj.weight, layer.dt_proj.bias
    steps = linear(step.to(weight.dtype), weight).float()
    steps = softplus(steps if bias is None else steps + bias.float())
    state = states.recurrence(rows, inputs.shape[-1], size)
    out, last = selective_scan(inputs, steps, -torch.exp(layer.A_log.float()), key, query, state)
    states.update_recurrent_state(last)
    out = (out + inputs * layer.D.float()) * silu(gate)
    result: Tensor = layer.out_proj(out.to(rows.dtype))
    return result


def headed_selective_mixer(layer: Any, rows: Tensor, states: States, positions: Tensor | None) -> Tensor:
    """The same of a layer of Zamba, whose channels are split into heads that are scanned each on its own."""
    pairs: Tensor = layer.in_proj(rows)  # of an input and its gate, one pair per channel
    inputs, gate = pairs.view(*rows.shape[:2], layer.intermediate_size, 2).unbind(-1)
    heads = (layer.n_mamba_heads, layer.mamba_head_dim)
    inputs = _convolve(layer, inputs, states)
    inputs, gate = (tensor.reshape(*rows.shape[:2], *heads) for tensor in (inputs, gate))
    rank, size = layer.time_step_rank, layer.ssm_state_size
    state = states.recurrence(rows, *heads, size)
    outs, lasts = [], []
    for head in range(layer.n_mamba_heads):
        own = inputs[:, :, head]
        step, key, query = torch.split(linear(own, layer.x_proj_weight[head]), [rank, size, size], dim=-1)
        steps = softplus(linear(step, layer.dt_proj_weight[head]).float() + layer.dt_proj_bias[head].float())
        rates = -torch.exp(layer.A_log[head].float())
        out, last = selective_scan(own, steps, rates, key, query, state[:, head])
        outs.append((out + own * layer.D[head].float()) * silu(gate[:, :, head]))
        lasts.append(last)
    states.update_recurrent_state(torch.stack(lasts, dim=1))
    result: Tensor = layer.out_proj(torch.cat(outs, dim=-1).to(rows.dtype))
    return result


def _convolve(layer: Any, inputs: Tensor, states: States) -> Tensor:
    """The causal convolution of `inputs` `[pieces, S, channels]` and its activation."""
    convolution = layer.conv1d
    seen = states.update_conv_state(inputs.transpose(1, 2), conv_kernel_size=layer.conv_kernel_size)
    out = conv1d(seen, convolution.weight, convolution.bias, groups=convolution.groups)
    activated: Tensor = layer.act(out).transpose(1, 2)
    return activated
