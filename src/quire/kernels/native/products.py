"""Products with weights that oneDNN has packed, by the library, which reads them where they lie."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.native.library import native

FORMATS = {torch.float32: 0, torch.bfloat16: 1}
MOST_ROWS = 64
"""Rows up to which native products are at least as fast as oneDNN's, or within 10 % of them (decision 044). Where
vectors fill panels and oneDNN has no tiles for their dtype, they are with any number of rows."""
_OF_TILES = 1024
"""Rows up to which products of the library's tiles are within a quarter of oneDNN's, which are faster there."""
_BESIDE_TILES = 4
"""Rows up to which products of vectors are, where oneDNN multiplies tiles."""
_WIDTHS = (64, 48, 32, 24, 16, 8)
_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Panels(ctypes.Structure):
    """`Panels` of products.h."""

    _fields_ = (
        *((name, _P) for name in ("weights", "bias")),
        *((name, _I64) for name in ("inputs", "outputs", "depth", "width")),
        *((name, _I32) for name in ("format", "rows_format")),
    )


class NativeProduct:
    """The product with the weights of a packed tensor, which the caller keeps, and with a bias. Up to `most_rows` it is
    as fast as oneDNN's."""

    def __init__(self, library: ctypes.CDLL, panels: Panels) -> None:
        self.panels = panels
        self._place = ctypes.addressof(panels)
        has_amx = torch.cpu._is_amx_tile_supported()
        is_beside = panels.format == FORMATS[torch.bfloat16] and has_amx
        has_tiles = library.quire_uses_tiles(ctypes.byref(panels))
        self.most_rows = _OF_TILES if has_tiles else _BESIDE_TILES if is_beside else MOST_ROWS
        if not is_beside and library.quire_takes_many_rows(ctypes.byref(panels)):
            self.most_rows = sys.maxsize
        self._multiply: Any = library.quire_multiply
        self._multiply.argtypes, self._multiply.restype = (_P, _P, _P, _I64, _I32), None

    def compute(self, rows: Tensor) -> Tensor:
        """Outputs `[..., out]` of contiguous `rows` `[..., in]`, in the dtype of both."""
        out = rows.new_empty((*rows.shape[:-1], self.panels.outputs))
        count = rows.numel() // self.panels.inputs
        self._multiply(self._place, rows.data_ptr(), out.data_ptr(), count, torch.get_num_threads())
        return out


def native_products(packed: Tensor, bias: Tensor | None, inputs: int, outputs: int) -> Iterator[NativeProduct]:
    """What the product may be: one for each width of panels that fits the size of `packed`, whose layout torch does not
    tell. All but one give other numbers."""
    library = native().library
    if library is None or packed.dtype not in FORMATS:
        return
    numbers = int(torch.ops.mkldnn._nbytes(packed)) // packed.dtype.itemsize
    for width in _WIDTHS:
        depth, rest = divmod(numbers, -(-outputs // width) * width)
        panels = Panels(
            weights=int(torch.ops.mkldnn.data_ptr(packed)),
            bias=None if bias is None else bias.data_ptr(),
            inputs=inputs,
            outputs=outputs,
            depth=depth,
            width=width,
            format=FORMATS[packed.dtype],
            rows_format=FORMATS[packed.dtype],
        )
        if not rest and depth >= inputs and library.quire_can_multiply(ctypes.byref(panels)):
            yield NativeProduct(library, panels)
