"""Encodes and decodes numbers by a KVFormat: plain FP8, and blocks of FP8 or FP4 numbers that share a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.kernels.workspace import Workspace
from quire.spec.kv_format import KVFormat
from quire.spec.layout import DType

_workspace = Workspace()


@dataclass(frozen=True, slots=True)
class _Grid:
    """The values of a narrow element. All numbers up to `reach` round to `largest`: half a step beyond it."""

    largest: float
    reach: float


_E4M3 = _Grid(largest=448.0, reach=464.0)
_E5M2 = _Grid(largest=57344.0, reach=61440.0)
_E2M1 = _Grid(largest=6.0, reach=7.0)

_SMALLEST_E4M3 = 2.0**-9
_SMALLEST_NORMAL = 2.0**-126  # float32's
_E8M0_BIAS = 127
_E8M0_NAN = 255


def encode(values: Tensor, kv_format: KVFormat) -> tuple[Tensor, Tensor | None]:
    """`values` `[..., width]` in stored form: `[..., stored_width]`, and scales `[..., scale_width]` or None.

    Plain formats convert the dtype. FP8 without scales rounds to nearest, ties to even, and saturates: infinities and
    what exceeds the largest finite number become that number; NaN stays NaN.

    With scales, every number is divided by its block's and rounded in the same way. A scale is computed from the
    block's largest number:

    - E8M0: the smallest power of two, from 2**-127, at which that number is no more than half a step above the largest
      element: nothing saturates. (OCP Microscaling 1.0, 6.3 suggests the exponent of the number alone, which saturates
      all between 464 and 512 times a power of two, or 7 and 8 times in E2M1.)
    - E4M3 (NVFP4): a sixth of it, rounded to nearest and never zero. The number itself has an error of a seventeenth at
      most, with subnormal scales of a fifth. There is no second scale per tensor: numbers beyond 6 * 448 saturate.
    - float32: a 448th of it (for E4M3 elements), at least 2**-126.

    A block of zeros gets the smallest scale. A block with a NaN or an infinity gets a NaN scale and decodes to NaN:
    four-bit numbers have no NaN. A block's codes do not depend on the batch. Raises InvalidInput if `width` does not
    fit the format.
    """
    kv_format.stored_width(values.shape[-1])
    if not kv_format.block:
        return _stored(values, kv_format), None
    num_blocks = kv_format.scale_width(values.shape[-1])
    blocks = values.float().reshape(*values.shape[:-1], num_blocks, kv_format.block)
    scales = _scales_of(blocks, kv_format)
    return _stored((blocks / _factors(scales)).flatten(-2), kv_format), scales


def decode(
    stored: Tensor, scales: Tensor | None, kv_format: KVFormat, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The numbers `[..., width]` in `dtype` of what `encode` returned; the product with a scale is computed in float32.

    A finite number that `dtype` cannot hold after rounding (float16, at the end of its range) saturates. `out`, a
    contiguous tensor of the result's shape and type, is filled and returned if given.
    """
    if scales is None:
        return _numbers(stored, kv_format, dtype, out)
    if dtype is torch.float32:
        return _multiply(_numbers(stored, kv_format, dtype, out), scales, dtype)
    shape = (*stored.shape[:-1], stored.shape[-1] * (2 if kv_format.bits == 4 else 1))
    wide = _workspace.take("wide", torch.float32, stored.device, *shape)
    _multiply(_numbers(stored, kv_format, torch.float32, wide), scales, dtype)
    return wide.to(dtype) if out is None else out.copy_(wide)


# -- scales


def _scales_of(blocks: Tensor, kv_format: KVFormat) -> Tensor:
    """One scale `[..., blocks]` in the stored type for each block of `blocks` float32 `[..., blocks, block]`."""
    grid = _grid(kv_format)
    assert grid is not None, f"{kv_format.name} has scales, but elements that need none"
    amax = blocks.abs().amax(-1)
    amax = torch.where(amax.isinf(), torch.nan, amax)
    if kv_format.scale is DType.UINT8:
        return _e8m0_scales(amax, grid)
    # A tensor: CUDA divides by a number by multiplying with its reciprocal, and rounds unlike other devices.
    scales = amax / amax.new_full((), grid.largest)
    if kv_format.scale is DType.FLOAT32:
        return scales.clamp_min(_SMALLEST_NORMAL)
    assert kv_format.scale is DType.FLOAT8_E4M3 and grid is _E2M1, f"no rule for the scales of {kv_format.name}"
    # Up to 1.5 subnormal steps the nearest is 1, but a largest number of 9 would have to become 6.
    least = torch.where(amax > grid.reach * _SMALLEST_E4M3, 2 * _SMALLEST_E4M3, _SMALLEST_E4M3)
    return torch.maximum(scales, least).clamp_max(_E4M3.largest).to(torch.float8_e4m3fn)


def _e8m0_scales(amax: Tensor, grid: _Grid) -> Tensor:
    """Bytes of the smallest `2**k` with `amax <= reach * 2**k`.

    `reach`, not `largest`: in between, the next power stores the same largest number and all others on a coarser grid,
    and encoding decoded numbers would find the smaller power.
    """
    reach, reach_exponent = math.frexp(grid.reach)
    # The floor changes no result: its exponent is clamped anyway. It gives zero one.
    mantissa, exponent = torch.frexp(amax.clamp_min(_SMALLEST_NORMAL))
    power = exponent - reach_exponent + (mantissa > reach)
    codes = (power + _E8M0_BIAS).clamp_min(0)
    return torch.where(amax.isnan(), _E8M0_NAN, codes).to(torch.uint8)


def _factors(scales: Tensor) -> Tensor:
    """The factors of the numbers: scales `[..., blocks]` as float32 `[..., blocks, 1]`."""
    exponents = scales.dtype is torch.uint8
    return (scales.view(torch.float8_e8m0fnu) if exponents else scales).float().unsqueeze(-1)


def _multiply(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`numbers` float32 `[..., width]`, times the scales of their blocks, in place; in the range of `dtype`."""
    blocks = numbers.view(*scales.shape, numbers.shape[-1] // max(scales.shape[-1], 1))
    limit = torch.finfo(dtype).max
    blocks.mul_(_factors(scales)).clamp_(-limit, limit)
    return numbers


# -- elements


def _grid(kv_format: KVFormat) -> _Grid | None:
    if kv_format.bits == 4:
        return _E2M1
    return {DType.FLOAT8_E4M3: _E4M3, DType.FLOAT8_E5M2: _E5M2}.get(kv_format.element)


def _stored(numbers: Tensor, kv_format: KVFormat) -> Tensor:
    """`numbers` `[..., width]`, divided by their scales, as elements of the storage type `[..., stored_width]`."""
    if kv_format.bits == 4:
        return _packed_e2m1(numbers.float())
    grid = _grid(kv_format)
    if grid is not None:
        # The conversion alone turns large numbers into infinities in E5M2.
        numbers = numbers.clamp(-grid.largest, grid.largest)
    return numbers.to(_storage_dtype(kv_format))


def _storage_dtype(kv_format: KVFormat) -> torch.dtype:
    dtype = getattr(torch, kv_format.element.value)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _packed_e2m1(numbers: Tensor) -> Tensor:
    """Codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. Two per byte, the first in the low half."""
    # NaN has no code; the scale of its block is NaN instead. But a NaN converted to an integer may be any number.
    size = numbers.abs().nan_to_num_(nan=0.0)
    # One line for each step between values (1/2, 1, 2); the lowest is the one that holds. Codes and mantissas are even
    # together, and so are the offsets, so `round` ties as E2M1 does.
    codes = torch.minimum((size * 2).round_(), size.round() + 2)
    codes = torch.minimum(codes, (size / 2).round_() + 4).clamp_(max=7).to(torch.uint8)
    codes = codes | (numbers.signbit().to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _numbers(stored: Tensor, kv_format: KVFormat, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The elements of `stored` as numbers in `dtype`, without their scales; in `out` if given."""
    pairs = kv_format.bits == 4 or stored.shape[-1] % 2 == stored.storage_offset() % 2 == 0
    if kv_format.encodes and dtype in _PAIR and stored.device.type == "cpu" and pairs:
        return _looked_up(stored, kv_format, dtype, out)
    numbers = _unpacked_e2m1(stored) if kv_format.bits == 4 else stored
    return numbers.to(dtype) if out is None else out.copy_(numbers)


def _unpacked_e2m1(stored: Tensor) -> Tensor:
    """The float32 numbers `[..., 2 * stored_width]` of packed codes."""
    codes = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
    # The exponent and mantissa of E2M1 are the lowest exponent bits and the highest mantissa bit of E4M3, subnormals
    # too; only the biases differ, by 6. A table would have to be copied to the device first.
    numbers = ((codes & 8) << 4) | ((codes & 7) << 2)
    return numbers.view(torch.float8_e4m3fn).float() * 2.0**6


# -- tables for the CPU, which converts FP8 number by number: a lookup of pairs is ten times faster

_PAIR = {torch.float32: torch.int64, torch.bfloat16: torch.int32, torch.float16: torch.int32}
"""The integer type as wide as two numbers of a type."""


def _looked_up(stored: Tensor, kv_format: KVFormat, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """`_numbers` by a table: of two bytes for FP8, of one for FP4, whose bytes have two numbers anyway."""
    codes = stored.contiguous().flatten().view(torch.uint8 if kv_format.bits == 4 else torch.uint16)
    index = _workspace.take("index", torch.int32, stored.device, len(codes)).copy_(codes)
    table = _pairs(kv_format.element, dtype)
    if out is None:
        out = torch.empty(*stored.shape[:-1], stored.shape[-1] * 8 // kv_format.bits, dtype=dtype)
    torch.index_select(table, 0, index, out=out.view(-1).view(table.dtype))
    return out


@cache
def _pairs(storage: DType, dtype: torch.dtype) -> Tensor:
    """The two numbers of every code in `dtype`, side by side in an integer: `[2 ** 16]` for FP8, `[2 ** 8]` for FP4."""
    with torch.inference_mode(False):
        if storage is DType.UINT8:
            numbers = _unpacked_e2m1(torch.arange(2**8, dtype=torch.int32).to(torch.uint8).unsqueeze(1))
        else:
            codes = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
            numbers = codes.view(torch.uint8).view(getattr(torch, storage.value))
        return numbers.to(dtype).flatten().view(_PAIR[dtype])
