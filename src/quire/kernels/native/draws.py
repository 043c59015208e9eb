"""Draws of a step by the library: what `Sampler` computes by operators, in one call."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.native.library import address_of, native

_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_TERMS = ("greedy", "temperature", "top_k", "top_p", "min_p")


class _Step(ctypes.Structure):
    _fields_ = (
        ("logits", _P),
        *((name, _I64) for name in ("rows", "width")),
        ("terms", _P),
        *((name, _I64) for name in ("record", *_TERMS)),
        *((name, _P) for name in ("keys", "tokens")),
        ("threads", _I64),
    )


class NativeDraws:
    """Draws of one thread. Records of terms have the fields `_TERMS`, which are those of the scheduler."""

    def __init__(self, library: ctypes.CDLL, record: np.dtype[Any]) -> None:
        fields = record.fields
        assert fields is not None
        self._draw: Any = library.quire_draw
        self._draw.argtypes, self._draw.restype = (_P,), None
        self._step = _Step(record=record.itemsize, **{name: fields[name][1] for name in _TERMS})
        self._place = ctypes.addressof(self._step)
        self._last: npt.NDArray[Any] | None = None

    def tokens(self, logits: Tensor, terms: npt.NDArray[Any], keys: npt.NDArray[np.uint64] | None) -> Tensor:
        """A token for each row of `logits`, float32 `[rows, vocabulary]`, contiguous: int64 `[rows]`. `terms` has a
        record for each row, and `keys` are of the noise of those that are not greedy."""
        step, rows = self._step, len(logits)
        assert logits.dtype == torch.float32 and logits.is_contiguous() and len(terms) == rows
        if terms is not self._last:
            assert terms.flags.c_contiguous and terms.itemsize == step.record
            self._last, step.terms, step.rows = terms, address_of(terms), rows
        tokens = torch.empty(rows, dtype=torch.int64)
        step.logits, step.tokens, step.width = logits.data_ptr(), tokens.data_ptr(), logits.shape[1]
        step.keys, step.threads = None if keys is None else address_of(keys), torch.get_num_threads()
        self._draw(self._place)
        return tokens


def native_draws(record: np.dtype[Any]) -> NativeDraws | None:
    """Draws by the library, with terms of this dtype; None if there is no library."""
    library = native().library
    return None if library is None else NativeDraws(library, record)
