"""Forward passes of recurrent layers that transformers cannot continue from an external state.

They run on the modules' own weights, over pieces that each begin with a state: rows `[pieces, S, hidden]`, their states
and their positions `[pieces, S]`. All return outputs `[pieces, S, hidden]` and advance the states by S tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear, silu, softplus

from quire.kernels.selective_scan import linear_scan, selective_scan
from quire.models.mixer_cache import MixerStates

_DECAY_SCALE = -8.0
"""RecurrentGemma: the recurrence's gate is this power of the decay, times the learned gate."""


def selective_mixer(layer: Any, rows: Tensor, states: MixerStates, positions: Tensor | None) -> Tensor:
    """Mamba, Falcon-Mamba and Jamba. transformers computes several tokens from zeros, without the earlier state."""
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


def headed_selective_mixer(layer: Any, rows: Tensor, states: MixerStates, positions: Tensor | None) -> Tensor:
    """Zamba: Mamba whose channels are split into heads, each scanned on its own."""
    pairs: Tensor = layer.in_proj(rows)  # an input and its gate, one pair per channel
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


def _convolve(layer: Any, inputs: Tensor, states: MixerStates) -> Tensor:
    """The causal convolution of `inputs` `[pieces, S, channels]` and its activation."""
    convolution = layer.conv1d
    seen = states.update_conv_state(inputs.transpose(1, 2), conv_kernel_size=layer.conv_kernel_size)
    out = conv1d(seen, convolution.weight, convolution.bias, groups=convolution.groups)
    activated: Tensor = layer.act(out).transpose(1, 2)
    return activated


def lightning_mixer(layer: Any, rows: Tensor, states: MixerStates, positions: Tensor | None) -> Tensor:
    """MiniMax's lightning attention, in blocks of many tokens; transformers continues a sequence token by token.

    The state of a head is the sum of the products of its keys and values, decayed by a constant per token.
    """
    heads, dim = layer.num_attention_heads, layer.head_dim
    mixed = layer.act_fn(layer.qkv_proj(rows)).unflatten(-1, (heads, 3 * dim)).transpose(1, 2)
    query, key, value = torch.split(mixed, dim, dim=-1)  # [pieces, heads, S, dim]
    state = states.recurrence(rows, heads, dim, dim)
    outs = []
    for start in range(0, rows.shape[1], layer.block_size):
        block = slice(start, start + layer.block_size)
        q, k, v = query[:, :, block], key[:, :, block], value[:, :, block]
        count = q.shape[2]
        inner = (q @ k.transpose(-1, -2) * layer.diagonal_decay[:, :, :count, :count]) @ v
        outs.append(inner + (q * layer.query_decay[:, :count]) @ state.to(q.dtype))
        decay = torch.exp(-layer.slope_rate.float() * count)
        state = state * decay + ((k * layer.key_decay[:, -count:]).transpose(-1, -2) @ v).float()
    states.update_recurrent_state(state)
    out = layer.norm(torch.cat(outs, dim=2).transpose(1, 2).flatten(2))
    result: Tensor = layer.out_proj(torch.sigmoid(layer.output_gate(rows)) * out)
    return result


def lru_mixer(layer: Any, rows: Tensor, states: MixerStates, positions: Tensor | None) -> Tensor:
    """RecurrentGemma's recurrent block, whose states transformers keeps in the modules, for one batch at a time.

    The first token of a sequence enters the state unscaled; the others are scaled by what the state loses.
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
