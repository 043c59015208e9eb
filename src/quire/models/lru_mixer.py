"""The forward pass of RecurrentGemma's recurrent block over pieces that begin with a state.

transformers keeps these states in the modules, for one batch at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, softplus

from quire.kernels.selective_scan import linear_scan
from quire.models.mixer_cache import States

_DECAY_SCALE = -8.0
"""The recurrence's gate is this power of the decay, times the gate that is learned."""


def lru_mixer(layer: Any, rows: Tensor, states: States, positions: Tensor | None) -> Tensor:
    """Outputs `[pieces, S, hidden]` of `layer` for `rows` of the same shape at `positions` `[pieces, S]`.

    The first token of a sequence enters the state as it is; the others are scaled by what the state loses.
    """
    assert positions is not None
    unit = layer.rg_lru
    side = layer.act_fn(layer.linear_y(rows))
    inputs = layer.linear_x(rows).transpose(1, 2)
    seen = states.update_conv_state(inputs, conv_kernel_size=layer.conv1d_width)
    inputs = conv1d(seen, layer.conv_1d.weight, layer.conv_1d.bias, groups=layer.conv_1d.groups).transpose(1, 2)
    blocks = inputs.reshape(*rows.shape[:2], unit.num_attention_heads, unit.block_width)
    enters = _gate(blocks, unit.input_gate_weight, unit.input_gate_bias)
    decay = _DECAY_SCALE * _gate(blocks, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    decay = decay * softplus(unit.recurrent_param)  # logarithm
    first = (positions == 0).unsqueeze(-1)
    scale = torch.where(first, 1.0, torch.sqrt(1 - torch.exp(2 * decay)))
    taken = inputs * enters * scale.to(inputs.dtype)
    decays = torch.exp(decay).masked_fill(first, 0.0)
    state = states.recurrence(rows, inputs.shape[-1], 1).squeeze(-1)
    out, last = linear_scan(decays, taken, state)
    states.update_recurrent_state(last.unsqueeze(-1))
    result: Tensor = layer.linear_out(out.to(rows.dtype) * side)
    return result


def _gate(blocks: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A gate per channel `[pieces, S, channels]` of `blocks` `[pieces, S, heads, width]`, mixed within each head."""
    return torch.sigmoid(torch.einsum("nshi,hio->nsho", blocks, weight) + bias).flatten(2)
