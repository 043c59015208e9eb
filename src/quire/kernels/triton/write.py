"""Rows written to slots by a Triton kernel, encoded in registers: bit for bit what `codec` encodes, in one launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fields import PagedField
from quire.kernels.triton.launch import Launch, hint, is_aligned
from quire.kernels.triton.numbers import (
    E2M1,
    E4M3,
    PLAIN,
    UNSCALED,
    device_of,
    encoded,
    from_e2m1,
    from_e4m3,
    from_e5m2,
    scale_code,
    scale_of,
    scaled,
    stored_field,
)

_NUMBERS = 4096
"""Numbers of rows that a program writes."""


# fmt: off
@triton.jit(do_not_specialize=["count"])
def write_tiles(
    source, source_row, source_head, rows, frame_stride, token, head_stride,
    scales, scale_frame, scale_token, scale_head, slots, seen, count, heads, ENTRIES: tl.constexpr,
    FORMAT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    N: tl.constexpr, SEEN: tl.constexpr,
):
    """Write N rows of one head of `source` to their `slots` in frames of so many ENTRIES; with SEEN, also as a reader
    sees them to `seen`, which is contiguous."""
    row, head = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N), tl.program_id(1)
    valid, dim = row < count, tl.arange(0, WIDE)
    inside = valid[:, None] & (dim < WIDTH)[None, :]
    given = tl.load(source + (row * source_row)[:, None] + head * source_head + dim[None, :], mask=inside, other=0)
    slot = tl.load(slots + row, mask=valid, other=0).to(tl.int64)
    frame, offset = slot // ENTRIES, slot % ENTRIES
    place = rows + (frame * frame_stride + offset * token)[:, None] + head * head_stride
    if FORMAT == PLAIN:
        stored = given.to(rows.dtype.element_ty)
        tl.store(place + dim[None, :], stored, mask=inside)
        number = stored.to(source.dtype.element_ty)
    else:
        wide = given.to(tl.float32)
        if SCALE != UNSCALED:
            block = tl.arange(0, WIDE // BLOCK)
            code = scale_code(tl.reshape(wide, (N, WIDE // BLOCK, BLOCK)), SCALE, FORMAT)
            factors = scale_of(code, SCALE)
            factor = scales + (frame * scale_frame + offset * scale_token)[:, None] + head * scale_head + block[None, :]
            tl.store(factor, code, mask=valid[:, None] & (block < WIDTH // BLOCK)[None, :])
            blocks = tl.reshape(wide, (N, WIDE // BLOCK, BLOCK))
            wide = tl.reshape(tl.div_rn(blocks, tl.broadcast_to(factors[:, :, None], blocks.shape)), (N, WIDE))
        code = encoded(wide, FORMAT)
        STORED: tl.constexpr = WIDE // 2 if FORMAT == E2M1 else WIDE
        LAST: tl.constexpr = WIDTH // 2 if FORMAT == E2M1 else WIDTH
        at = tl.arange(0, STORED)
        tl.store(place + at[None, :], code, mask=valid[:, None] & (at < LAST)[None, :])
        if FORMAT == E2M1:
            number = tl.interleave(from_e2m1(code & 15), from_e2m1(code >> 4))
        elif FORMAT == E4M3:
            number = from_e4m3(code)
        else:
            number = from_e5m2(code)
        if SCALE != UNSCALED:
            number = scaled(number, factors, BLOCK, source.dtype.element_ty)
        number = number.to(source.dtype.element_ty)
    if SEEN:
        tl.store(seen + (row * heads + head)[:, None] * WIDTH + dim[None, :], number, mask=inside)
# fmt: on


class _Writing:
    """What writes of rows of one type to a field have in common."""

    def __init__(self, field: PagedField, rows: Tensor) -> None:
        self.stored = stored = stored_field(field)
        self.differs = bool(stored.format) or stored.arguments[0].dtype != rows.dtype
        self.n = max(1, _NUMBERS // stored.wide)
        constants: dict[str, Any] = {name.removeprefix("_"): given for name, given in stored.constants("").items()}
        constants |= {"ENTRIES": stored.entries, "N": self.n, "SEEN": self.differs}
        self.launch = Launch(write_tiles, constants, enable_fp_fusion=False)


def write_rows(field: PagedField, slots: Tensor, rows: Tensor) -> Tensor:
    """`PagedField.write`."""
    heads_of = rows if rows.dim() == 3 else rows.unsqueeze(1)
    heads_of = heads_of if heads_of.stride(2) == 1 else heads_of.contiguous()
    writing: _Writing | None = field.kept.get((_Writing, rows.dtype))
    if writing is None:
        writing = field.kept[_Writing, rows.dtype] = _Writing(field, rows)
    seen = rows.new_empty(rows.shape) if writing.differs else rows
    if count := len(rows):
        stored = writing.stored
        row, head, _ = heads_of.stride()
        arguments = (heads_of, row, head, *stored.arguments, slots, seen, count, stored.heads)
        kind = (is_aligned(heads_of), is_aligned(slots), is_aligned(seen), hint(row), hint(head))
        with device_of(rows):
            writing.launch((-(-count // writing.n), stored.heads, 1), arguments, kind)
    return seen
