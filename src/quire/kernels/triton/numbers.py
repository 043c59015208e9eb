"""Stored numbers in registers: functions of kernels that decode a tile of rows, and encode one.

Conversions use integers alone, so that they run on devices without instructions for FP8, and give the same bits as
`codec`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fields import PagedField
from quire.spec.layout import DType

PLAIN, E4M3, E5M2, E2M1 = (tl.constexpr(code) for code in range(4))
UNSCALED, FLOAT32, E8M0, SCALED_E4M3 = (tl.constexpr(code) for code in range(4))

_FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
_SCALES = {None: 0, DType.FLOAT32: 1, DType.UINT8: 2, DType.FLOAT8_E4M3: 3}


@triton.jit
def from_e4m3(code):
    """Float32 of E4M3 bytes: their bits are those of a float16 whose exponent is 8 less."""
    size = code & 0x7F
    number = (size.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    number = tl.where(size == 0x7F, float("nan"), number)
    return tl.where(code >= 0x80, -number, number)


@triton.jit
def from_e5m2(code):
    """Float32 of E5M2 bytes, which are the upper halves of float16."""
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def from_e2m1(code):
    """Float32 of E2M1 codes below 16: their bits are those of a float16 whose exponent is 14 less."""
    number = ((code & 7).to(tl.uint16) << 9).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return tl.where(code >= 8, -number, number)


@triton.jit
def from_e8m0(code):
    """Float32 `2 ** (code - 127)`; 255 is NaN."""
    bits = tl.where(code == 0, 0x400000, code.to(tl.int32) << 23)
    return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def scale_of(stored, SCALE: tl.constexpr):
    """Float32 of stored scales."""
    if SCALE == E8M0:
        return from_e8m0(stored)
    if SCALE == SCALED_E4M3:
        return from_e4m3(stored)
    return stored.to(tl.float32)


@triton.jit
def _in_range(number, DTYPE: tl.constexpr):
    """Float32 numbers within what DTYPE holds; NaN stays NaN."""
    if tl.float16 == DTYPE:
        limit = 65504.0
    elif tl.bfloat16 == DTYPE:
        limit = 3.3895313892515355e38
    else:
        limit = 3.4028234663852886e38
    return tl.where(number > limit, limit, tl.where(number < -limit, -limit, number))


@triton.jit
def scaled(number, factors, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers `[N, WIDE]` times `factors` `[N, WIDE // BLOCK]` of their blocks, in DTYPE."""
    N: tl.constexpr = number.shape[0]
    WIDE: tl.constexpr = number.shape[1]
    blocks = tl.reshape(number, (N, WIDE // BLOCK, BLOCK)) * factors[:, :, None]
    return _in_range(tl.reshape(blocks, (N, WIDE)), DTYPE).to(DTYPE)


# fmt: off
@triton.jit
def read_tile(
    rows, frame_stride, token, head_stride, scales, scale_frame, scale_token, scale_head, frames, offsets, valid, head,
    FORMAT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The rows `[N, WIDE]` at `offsets` in `frames` int64 `[N]` where they are `valid`, and one head, in DTYPE; zeros
    elsewhere, and beyond WIDTH numbers. What is not valid is not read."""
    STORED: tl.constexpr = WIDE // 2 if FORMAT == E2M1 else WIDE
    LAST: tl.constexpr = WIDTH // 2 if FORMAT == E2M1 else WIDTH
    at = tl.arange(0, STORED)
    places = rows + head * head_stride + (frames * frame_stride + offsets * token)[:, None] + at[None, :]
    if STORED == LAST:
        code = tl.load(places, mask=valid[:, None], other=0)
    else:
        code = tl.load(places, mask=valid[:, None] & (at < LAST)[None, :], other=0)
    if FORMAT == PLAIN:
        return code.to(DTYPE)
    if FORMAT == E2M1:
        number = tl.interleave(from_e2m1(code & 15), from_e2m1(code >> 4))
    elif FORMAT == E4M3:
        number = from_e4m3(code)
    else:
        number = from_e5m2(code)
    if SCALE == UNSCALED:
        return number.to(DTYPE)
    block = tl.arange(0, WIDE // BLOCK)
    seen = valid[:, None] & (block < WIDTH // BLOCK)[None, :]
    factors = scales + head * scale_head + (frames * scale_frame + offsets * scale_token)[:, None] + block[None, :]
    stored = tl.load(factors, mask=seen, other=0)
    return scaled(number, scale_of(stored, SCALE), BLOCK, DTYPE)
# fmt: on


# -- encoding


@triton.jit
def _bits(number):
    """Sign and size of float32, as integers."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits >> 31) & 1, bits & 0x7FFFFFFF


@triton.jit
def _rounded(number):
    """Float32 below 2**22, to the nearest integer, ties to even."""
    return (number + 12582912.0) - 12582912.0


@triton.jit
def _to_e4m3(number):
    """E4M3 bytes of float32 numbers, rounded to nearest, ties to even; what is too large becomes the largest."""
    sign, size = _bits(number)
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    large = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
    code = tl.where(size < (121 << 23), small, large)
    return (tl.where(is_nan, 0x7F, code) | (sign << 7)).to(tl.uint8)


@triton.jit
def _to_e5m2(number):
    """E5M2 bytes; as `_to_e4m3`."""
    sign, size = _bits(number)
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x47600000)
    small = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - (134 << 23)
    large = (size + 0xFFFFF + ((size >> 21) & 1) - (112 << 23)) >> 21
    code = tl.where(size < (113 << 23), small, large)
    return (tl.where(is_nan, 0x7F, code) | (sign << 7)).to(tl.uint8)


@triton.jit
def _to_e2m1(number):
    """Packed E2M1 codes `[N, WIDE // 2]` of float32 `[N, WIDE]`, the first in the low half; see `codec`."""
    sign, bits = _bits(number)
    size = tl.where(bits > 0x7F800000, 0, tl.minimum(bits, 0x41800000)).to(tl.float32, bitcast=True)
    code = tl.minimum(_rounded(size * 2.0), _rounded(size) + 2.0)
    code = tl.minimum(tl.minimum(code, _rounded(size * 0.5) + 4.0), 7.0).to(tl.int32) | (sign << 3)
    low, high = tl.split(tl.reshape(code, (number.shape[0], number.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def encoded(number, FORMAT: tl.constexpr):
    """Stored bytes of float32 `[N, WIDE]`, already divided by their scales."""
    if FORMAT == E2M1:
        code = _to_e2m1(number)
    elif FORMAT == E4M3:
        code = _to_e4m3(number)
    else:
        code = _to_e5m2(number)
    return code


@triton.jit
def scale_code(blocks, SCALE: tl.constexpr, FORMAT: tl.constexpr):
    """Stored scales `[N, blocks]` of float32 `[N, blocks, BLOCK]`, by the rules of `codec`. Blocks with a NaN or an
    infinity have NaN."""
    _, size = _bits(blocks)
    largest = tl.max(size, 2)  # sizes are ordered as their bits are
    is_nan = largest >= 0x7F800000
    amax = largest.to(tl.float32, bitcast=True)
    REACH: tl.constexpr = 6.0 if FORMAT == E2M1 else 448.0
    if SCALE == E8M0:
        least = tl.maximum(largest, 1 << 23)
        if FORMAT == E2M1:
            power = (least >> 23) - 126 - 3 + ((least & 0x7FFFFF) > 0x600000).to(tl.int32)
        else:
            power = (least >> 23) - 126 - 9 + ((least & 0x7FFFFF) > 0x680000).to(tl.int32)
        code = tl.where(is_nan, 255, tl.maximum(power + 127, 0)).to(tl.uint8)
    elif SCALE == FLOAT32:
        scale = tl.div_rn(amax, tl.full(amax.shape, REACH, tl.float32))
        code = tl.where(is_nan, float("nan"), tl.maximum(scale, 1.1754943508222875e-38))
    else:
        scale = tl.div_rn(amax, tl.full(amax.shape, REACH, tl.float32))
        least = tl.where(amax > 7.0 / 512, 2.0 / 512, 1.0 / 512)
        code = _to_e4m3(tl.where(is_nan, float("nan"), tl.maximum(scale, least)))
    return code


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the device of a tensor the current one of this thread: Triton launches there, whatever its arguments."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


class StoredField:
    """A field as kernels take it: `arguments` in order, and its constants by name. A frame has `entries` rows, and a
    head `width` numbers."""

    __slots__ = ("arguments", "block", "entries", "format", "heads", "scale", "wide", "width")

    def __init__(self, field: PagedField) -> None:
        frames, scale_frames, kv_format = field.stored
        rows, scales = frames, scale_frames
        if rows.dim() == 3:
            rows, scales = rows.unsqueeze(2), None if scales is None else scales.unsqueeze(2)
        packed = kv_format is not None and kv_format.bits == 4
        self.format = 3 if packed else _FORMATS.get(rows.dtype, 0)
        self.width, self.heads, self.entries = rows.shape[3] * (2 if packed else 1), rows.shape[2], rows.shape[1]
        self.wide = max(16, triton.next_power_of_2(self.width))
        self.scale, self.block = 0, 1
        bits = rows.view(torch.uint8) if self.format else rows
        factors = bits
        if kv_format is not None and scales is not None:
            self.scale, self.block = _SCALES[kv_format.scale], kv_format.block
            factors = scales.view(torch.uint8) if scales.element_size() == 1 else scales
        self.arguments: tuple[Any, ...] = (bits, *bits.stride()[:3], factors, *factors.stride()[:3])

    def constants(self, name: str) -> dict[str, int]:
        """FORMAT, SCALE, BLOCK, WIDTH and WIDE, each after `name`."""
        return {f"{name}_{each.upper()}": getattr(self, each) for each in ("format", "scale", "block", "width", "wide")}


def stored_field(field: PagedField) -> StoredField:
    """What each call on a field has."""
    found: StoredField | None = field.kept.get(StoredField)
    if found is None:
        found = field.kept[StoredField] = StoredField(field)
    return found
