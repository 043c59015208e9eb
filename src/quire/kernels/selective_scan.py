"""The selective scan (Mamba 1) with a state to begin with and the state it ends with, in float32.

    state[t] = exp(dt[t] * A) * state[t - 1] + dt[t] * x[t] * B[t]        y[t] = sum over n of C[t] * state[t]

A segment of tokens is laid out as a square: blocks that are scanned side by side, each from zero, and then joined one
after the other. That takes two steps of Python per square root of the tokens, not one per token, and multiplies decays,
which are at most 1, and never divides by them: no exponent can overflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

_SEGMENT_NUMBERS = 1 << 22
"""States held at once, in numbers: tokens of a segment times channels times state size. 16 MiB each for them and the
decays, which is what a segment costs beside its input."""


def selective_scan(
    x: Tensor, dt: Tensor, decay_rates: Tensor, key: Tensor, query: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs `[n, S, channels]` and last states `[n, channels, size]`, both float32, of `n` pieces of S tokens each.

    `x` and `dt` are `[n, S, channels]`, `dt` the positive step sizes; `decay_rates` (A, negative) is
    `[channels, size]`; `key` and `query` (B and C) are `[n, S, size]`; `state` `[n, channels, size]` is not changed.
    The tokens of one piece are computed in an order that depends on its length alone.
    """
    pieces, length, channels = x.shape
    size = decay_rates.shape[1]
    rates, state = decay_rates.float(), state.float()
    out = torch.empty(pieces, length, channels, dtype=torch.float32, device=x.device)
    segment = max(1, _SEGMENT_NUMBERS // (channels * size))
    for start in range(0, length, segment):
        part = slice(start, min(start + segment, length))
        block = math.isqrt(part.stop - part.start - 1) + 1
        blocks = -(-(part.stop - part.start) // block)
        extra = (0, 0, 0, blocks * block - (part.stop - part.start))
        # A step of size 0 keeps the state as it is: what fills the last block changes nothing.
        steps, inputs, keys = (pad(t[:, part].float(), extra) for t in (dt, x, key))
        decays = torch.exp(steps.unsqueeze(-1) * rates)
        states = (steps * inputs).unsqueeze(-1) * keys.unsqueeze(2)
        shape = (pieces, blocks, block, channels, size)
        state = _scan_blocks(decays.view(shape), states.view(shape), state)
        read = states[:, : part.stop - part.start] @ query[:, part].float().unsqueeze(-1)
        out[:, part] = read.squeeze(-1)
    return out, state


def _scan_blocks(decays: Tensor, states: Tensor, state: Tensor) -> Tensor:
    """Turn the inputs in `states` `[n, blocks, block, channels, size]` into states, in place; returns the last ones.

    `decays`, of the same shape, ends as the products of the decays since each block's start.
    """
    for offset in range(1, states.shape[2]):
        states[:, :, offset].addcmul_(decays[:, :, offset], states[:, :, offset - 1])
        decays[:, :, offset].mul_(decays[:, :, offset - 1])
    for index in range(states.shape[1]):
        states[:, index].addcmul_(decays[:, index], state.unsqueeze(1))
        state = states[:, index, -1]
    return state.clone()
