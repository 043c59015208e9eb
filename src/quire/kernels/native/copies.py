"""Copies of rows by the library, in one call wherever they lie. Other threads of Python run meanwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.native.library import native
from quire.spec.ids import Ids

_P, _I64 = ctypes.c_void_p, ctypes.c_int64
Rows = npt.NDArray[np.uint8]
"""uint8 `[rows, bytes]`, of which each row is contiguous."""


def native_copy_rows() -> Callable[[Rows, Rows, Ids, Ids], None] | None:
    """What copies rows `sources[i]` of one array to rows `targets[i]` of another, of as many bytes; it trusts the
    indices. None if there is no library."""
    library = native().library
    if library is None:
        return None
    call: Any = library.quire_copy_rows
    call.argtypes, call.restype = (_P, _I64, _P, _I64, _I64, _I64, _P, _P), None

    def copy(source: Rows, target: Rows, sources: Ids, targets: Ids) -> None:
        assert source.strides[1] == target.strides[1] == 1 and source.shape[1] == target.shape[1]
        at, to = (np.ascontiguousarray(each, dtype=np.int32) for each in (sources, targets))
        assert len(at) == len(to), "a target for each source"
        rows = (source.ctypes.data, source.strides[0], target.ctypes.data, target.strides[0])
        call(*rows, source.shape[1], len(at), at.ctypes.data, to.ctypes.data)

    return copy
