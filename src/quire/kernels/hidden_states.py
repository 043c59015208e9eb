"""RowFunctions: what a decoder layer computes between its products, natively on the CPU or by torch's operators.

Both round where transformers' modules do: results differ by the order of sums alone.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from quire.kernels.native.library import native

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float

Norms = tuple[Tensor, Tensor, float]
"""Two weights, and the epsilon of both."""


class RowFunctions:
    """Torch's operators, on any device. Rows are contiguous, of one dtype. `backend` is the name of what computes."""

    backend = "torch"

    def add_rms_norm(self, rows: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`rows + added`, or `rows` if nothing is added, and their RMS norm times `weight`, all `[..., width]`."""
        total = rows if added is None else rows + added
        return total, _rms_norm(total, weight, eps)

    def rotate(self, heads: Tensor, first: int, count: int, cos: Tensor, sin: Tensor, norms: Norms | None) -> None:
        """Rotate the first `count` of `heads` `[T, all heads, dim]` in place, by `cos` and `sin` `[T, dim]`.

        Before that, with `norms`, the first `first` heads are normalised with one weight and the others with another.
        """
        turned = heads[:, :count]
        if norms is not None:
            own, other, eps = norms
            turned = torch.cat((_rms_norm(turned[:, :first], own, eps), _rms_norm(turned[:, first:], other, eps)), 1)
        low, high = turned.chunk(2, dim=-1)
        crossed = torch.cat((-high, low), dim=-1)
        heads[:, :count] = turned * cos[:, None] + crossed * sin[:, None]

    def gated_silu(self, pairs: Tensor) -> Tensor:
        """SiLU of the first half of each row times its second half, `[..., width / 2]`."""
        gate, up = pairs.chunk(2, dim=-1)
        return silu(gate) * up


class NativeRows(RowFunctions):
    """Compiled functions, on the CPU, in float32 or bfloat16."""

    backend = "native"

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._kind = _KINDS[dtype]
        self._norm: Any = library.quire_add_rms_norm
        self._norm.argtypes = [ctypes.c_int, *[_POINTER] * 5, _LONG, _LONG, _FLOAT]
        self._rotate: Any = library.quire_rotate
        self._rotate.argtypes = [ctypes.c_int, *[_POINTER] * 5, *[_LONG] * 5, _FLOAT]
        self._silu: Any = library.quire_gated_silu
        self._silu.argtypes = [ctypes.c_int, _POINTER, _POINTER, _LONG, _LONG]
        for function in (self._norm, self._rotate, self._silu):
            function.restype = None

    def add_rms_norm(self, rows: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, width = torch.empty_like(rows), rows.shape[-1]
        total = rows if added is None else torch.empty_like(rows)
        more = None if added is None else added.data_ptr()
        places = rows.data_ptr(), more, weight.data_ptr(), total.data_ptr(), out.data_ptr()
        self._norm(self._kind, *places, rows.numel() // width, width, eps)
        return total, out

    def rotate(self, heads: Tensor, first: int, count: int, cos: Tensor, sin: Tensor, norms: Norms | None) -> None:
        own, other, eps = (None, None, 0.0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr(), norms[2])
        places = heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), own, other
        self._rotate(self._kind, *places, heads.shape[0], heads.stride(0), first, count, heads.shape[2], eps)

    def gated_silu(self, pairs: Tensor) -> Tensor:
        width = pairs.shape[-1] // 2
        out = pairs.new_empty((*pairs.shape[:-1], width))
        self._silu(self._kind, pairs.data_ptr(), out.data_ptr(), out.numel() // width, width)
        return out


def row_functions(device: torch.device, dtype: torch.dtype) -> RowFunctions:
    """The native functions where there are any, else torch's."""
    library = native().library
    if library is None or device.type != "cpu" or dtype not in _KINDS:
        return RowFunctions()
    return NativeRows(library, dtype)


def _rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = rows.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(rows.dtype)
