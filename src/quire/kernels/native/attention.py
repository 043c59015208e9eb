"""Attention by the compiled kernel: tensors in, one call of the library, a tensor out. Nothing is planned in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.fields import PagedField
from quire.kernels.terms import AttentionTerms
from quire.spec.kv_format import KVFormat
from quire.spec.layout import DType

if TYPE_CHECKING:
    from quire.kernels.batch import PagedBatch

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}
_E2M1 = 5
_SCALES = {None: 0, DType.FLOAT32: 1, DType.UINT8: 2, DType.FLOAT8_E4M3: 3}
_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Field(ctypes.Structure):
    _fields_ = (
        ("rows", _P),
        *((name, _I64) for name in ("frame", "token", "head")),
        ("scales", _P),
        *((name, _I64) for name in ("scale_frame", "scale_token", "scale_head")),
        *((name, _I32) for name in ("format", "scale", "block", "width")),
    )


class KernelCall(ctypes.Structure):
    """`Call` of call.h."""

    _fields_ = (
        *(("query", _P), ("query_row", _I64), ("query_head", _I64), ("out", _P), ("lse", _P), ("sinks", _P)),
        *((name, _Field) for name in ("key", "key_tail", "value")),
        *((name, _P) for name in ("starts", "contexts", "frames", "parents")),
        *(("frame_row", _I64), ("slots", _P), ("hidden", _P)),
        *((name, _I64) for name in ("sequences", "rows", "heads", "kv_heads", "page_size", "window", "selected")),
        *((name, _I32) for name in ("query_format", "out_format", "chunked", "threads")),
        *(("scale", _F32), ("softcap", _F32)),
    )


class NativeAttention:
    """The kernel of a loaded library. Its methods are those of `AttentionKernel`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.quire_attend
        self._attend.argtypes, self._attend.restype = (ctypes.POINTER(KernelCall),), None

    def pages(
        self,
        query: Tensor,
        parts: Sequence[PagedField | None],
        batch: PagedBatch,
        terms: AttentionTerms,
        *,
        keep_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        starts, contexts, frames = _int32(batch.query_starts), _int32(batch.context_lens), _int32(batch.frames)
        parents = None if batch.parents is None else _int32(batch.parents)
        call = self.described(query, parts, terms)
        call.starts, call.contexts, call.frames = starts.ctypes.data, contexts.ctypes.data, frames.ctypes.data
        call.parents = None if parents is None else parents.ctypes.data
        call.frame_row, call.sequences, call.rows = frames.shape[1], len(contexts), int(starts[-1])
        call.window, call.chunked = terms.window, terms.chunked
        assert call.page_size == batch.page_size, "frames have an entry for each token"
        wide = None if terms.sinks is None or keep_lse else terms.sinks.float().contiguous()
        call.sinks = None if wide is None else wide.data_ptr()
        return self._run(call, query, keep_lse=keep_lse)

    def selected(
        self, query: Tensor, parts: Sequence[PagedField | None], slots: Tensor, hidden: Tensor, terms: AttentionTerms
    ) -> tuple[Tensor, Tensor]:
        slots, hidden = slots.contiguous(), hidden.contiguous()
        call = self.described(query, parts, terms)
        call.slots, call.hidden, call.selected = slots.data_ptr(), hidden.data_ptr(), slots.shape[1]
        call.rows = len(slots)
        out, lse = self._run(call, query, keep_lse=True)
        assert lse is not None
        return out, lse

    def described(self, query: Tensor, parts: Sequence[PagedField | None], terms: AttentionTerms) -> KernelCall:
        """A call of these terms on these fields, without the rows of a step."""
        key, tail, value = parts
        assert key is not None
        call = KernelCall(query=query.data_ptr(), query_format=FORMATS[query.dtype])
        call.scale, call.softcap = terms.scale, terms.softcap or 0
        call.query_row, call.query_head = (stride * query.element_size() for stride in query.stride()[:2])
        call.key, call.page_size, call.kv_heads = _field(key)
        if tail is not None:
            call.key_tail, *_ = _field(tail)
        if value is not None:
            call.value, *_ = _field(value)
        call.heads, call.threads = query.shape[1], torch.get_num_threads()
        return call

    def _run(self, call: KernelCall, query: Tensor, *, keep_lse: bool) -> tuple[Tensor, Tensor | None]:
        width = call.value.width or call.key.width + call.key_tail.width
        out = query.new_empty(query.shape[0], query.shape[1], width, dtype=torch.float32 if keep_lse else query.dtype)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if keep_lse else None
        call.out, call.out_format = out.data_ptr(), FORMATS[out.dtype]
        call.lse = None if lse is None else lse.data_ptr()
        self._attend(call)
        return out, lse


def _field(field: PagedField) -> tuple[_Field, int, int]:
    """A field for the library, the entries of a frame, and heads: the same in each call, since pools do not move."""
    known: tuple[_Field, int, int] | None = field.kept.get(_Field)
    if known is None:
        known = field.kept[_Field] = _new_field(*field.stored)
    return known


def _new_field(rows: Tensor, scales: Tensor | None, kv_format: KVFormat | None) -> tuple[_Field, int, int]:
    if rows.dim() == 3:
        rows, scales = rows.unsqueeze(2), None if scales is None else scales.unsqueeze(2)
    width = rows.shape[3]
    found = _Field(rows=rows.data_ptr(), width=width)
    found.frame, found.token, found.head = (stride * rows.element_size() for stride in rows.stride()[:3])
    if kv_format is not None and kv_format.bits == 4:
        found.format, found.width = _E2M1, 2 * width
    else:
        found.format = FORMATS[rows.dtype]
    if scales is not None and kv_format is not None:
        found.scales, found.scale, found.block = scales.data_ptr(), _SCALES[kv_format.scale], kv_format.block
        found.scale_frame, found.scale_token, found.scale_head = (
            stride * scales.element_size() for stride in scales.stride()[:3]
        )
    return found, rows.shape[1], rows.shape[2]


def _int32(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(array, dtype=np.int32)
