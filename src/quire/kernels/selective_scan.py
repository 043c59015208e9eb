"""Linear recurrences of many independent numbers, from a given state to a returned one, in float32.

    states[t] = decays[t] * states[t - 1] + inputs[t]

The tokens are laid out as a square: blocks are scanned side by side, each from zero, and then joined one after the
other. That needs two Python steps per square root of the tokens instead of one per token. It multiplies decays, which
are at most 1, and never divides by them, so no exponent can overflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

_SEGMENT_NUMBERS = 1 << 20
"""Numbers in the states of a selective scan at once: tokens of a segment times channels times state size. They and the
decays use 4 MiB each, which is the cost of a segment beside its input."""


def linear_scan(decays: Tensor, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """States float32 `[n, S, channels]` of all tokens, and a copy of the last ones, `[n, channels]`.

    `decays` and `inputs` are `[n, S, channels]`; `state` `[n, channels]` is not changed.
    """
    length = inputs.shape[1]
    blocks, block, extra = _square(length)
    # The last block is filled with a decay of 1 and an input of 0, which keep a state.
    products = pad(decays.float(), (0, 0, 0, extra), value=1.0).clone()
    states = pad(inputs.float(), (0, 0, 0, extra)).clone()
    shape = (len(inputs), blocks, block, inputs.shape[2])
    last = _scan_blocks(products.view(shape), states.view(shape), state.float())
    return states[:, :length], last


def selective_scan(
    x: Tensor, dt: Tensor, decay_rates: Tensor, key: Tensor, query: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The scan of Mamba 1: outputs `[n, S, channels]` and last states `[n, channels, size]`, both float32.

    The state of a channel decays by `exp(dt * A)` and takes in `dt * x * B`; the output is its product with C.
    `x` and `dt` are `[n, S, channels]`, `dt` the positive step sizes; `decay_rates` (A, negative) is
    `[channels, size]`; `key` and `query` (B and C) are `[n, S, size]`; `state` `[n, channels, size]` is not changed.
    The order in which the tokens of a piece are computed depends on its length and its widths alone.
    """
    pieces, length, channels = x.shape
    size = decay_rates.shape[1]
    rates, state = decay_rates.float(), state.float()
    out = torch.empty(pieces, length, channels, dtype=torch.float32, device=x.device)
    segment = max(1, _SEGMENT_NUMBERS // (channels * size))
    for start in range(0, length, segment):
        part = slice(start, min(start + segment, length))
        blocks, block, extra = _square(part.stop - part.start)
        # A step of size 0 keeps the state.
        steps, inputs, keys = (pad(t[:, part].float(), (0, 0, 0, extra)) for t in (dt, x, key))
        decays = torch.exp(steps.unsqueeze(-1) * rates)
        states = (steps * inputs).unsqueeze(-1) * keys.unsqueeze(2)
        shape = (pieces, blocks, block, channels, size)
        state = _scan_blocks(decays.view(shape), states.view(shape), state)
        read = states[:, : part.stop - part.start] @ query[:, part].float().unsqueeze(-1)
        out[:, part] = read.squeeze(-1)
    return out, state


def _square(length: int) -> tuple[int, int, int]:
    """Number of blocks, tokens of a block, and how many tokens that is beyond `length`."""
    block = math.isqrt(length - 1) + 1
    blocks = -(-length // block)
    return blocks, block, blocks * block - length


def _scan_blocks(decays: Tensor, states: Tensor, state: Tensor) -> Tensor:
    """Turn the inputs in `states` `[n, blocks, block, *numbers]` into states, in place; returns the last ones.

    `decays`, of the same shape, become the products of the decays since each block's start.
    """
    for offset in range(1, states.shape[2]):
        states[:, :, offset].addcmul_(decays[:, :, offset], states[:, :, offset - 1])
        decays[:, :, offset].mul_(decays[:, :, offset - 1])
    for index in range(states.shape[1]):
        states[:, index].addcmul_(decays[:, index], state.unsqueeze(1))
        state = states[:, index, -1]
    return state.clone()
