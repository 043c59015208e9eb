"""All decoder layers of a step in one call of the library, which writes the pages and reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.batch import PagedBatch
from quire.kernels.fields import PagedField
from quire.kernels.native.attention import KernelCall, NativeAttention
from quire.kernels.native.products import FORMATS, MOST_ROWS, NativeProduct, Panels
from quire.kernels.terms import AttentionTerms

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

_LINE = 64  # bytes
_NOTHING: Mapping[int, Tensor] = {}

Norm = tuple[Tensor, float]
"""A weight and its epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a layer computes with. `products`: of queries, keys and values; after attention; of gate and up; after
    these. `first`: the norm before attention, None where the caller says what attention reads. `norms`: the one after
    attention, and of queries and keys where heads are normalised."""

    products: tuple[NativeProduct, ...]
    first: Norm | None
    norms: tuple[Norm, ...]
    terms: AttentionTerms
    queries: int
    keys: int
    dim: int


@dataclass(frozen=True, slots=True)
class LayerFields:
    """The keys and values of a layer, and which of the step's batches says where they are."""

    key: PagedField
    value: PagedField
    group: int


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Panels) for name in ("heads", "out", "pairs", "down")),
        *((name, _P) for name in ("first_norm", "second_norm", "query_norm", "key_norm")),
        *((name, _F32) for name in ("first_eps", "second_eps", "head_eps")),
        ("group", _I32),
        ("attention", KernelCall),
    )


class _Group(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("starts", "contexts", "frames", "parents", "slots")),
        *((name, _I64) for name in ("frame_row", "sequences")),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("layers", "groups", "memory", "hidden", "read", "kept", "cosines", "sines")),
        *((name, _I64) for name in ("num_layers", "rows", "width", "wide_row", "narrow_row", "dim", "queries", "keys")),
        *((name, _I32) for name in ("format", "threads")),
    )


class NativeLayers:
    """The layers of one model on its fields, in one dtype. Fields and weights stay where they are; the caller makes it
    anew when they were replaced. Up to `most_rows` its products are as fast as others."""

    def __init__(
        self,
        library: ctypes.CDLL,
        attention: NativeAttention,
        parts: Sequence[LayerParts],
        fields: Sequence[LayerFields],
    ) -> None:
        self._decode = library.quire_decode
        self._decode.argtypes, self._decode.restype = (_P,), None
        self._kept = list(parts)  # whose tensors have addresses in `_layers`
        self._dtype = parts[0].norms[0][0].dtype
        products = [product for each in parts for product in each.products]
        self.most_rows = min(product.most_rows for product in products)
        if any(product.panels.format != FORMATS[self._dtype] for product in products):
            self.most_rows = min(self.most_rows, MOST_ROWS)  # rows are widened all at once
        layers = [self._layer(attention, *each) for each in zip(parts, fields, strict=True)]
        self._layers = (_Layer * len(layers))(*layers)
        first = parts[0]
        self._pass = _Pass(layers=ctypes.addressof(self._layers), num_layers=len(layers), format=FORMATS[self._dtype])
        self._pass.width, self._pass.dim = len(first.norms[0][0]), first.dim
        self._pass.queries, self._pass.keys = first.queries, first.keys
        panels = [[product.panels for product in each.products] for each in parts]
        self._pass.wide_row = max(of.outputs for heads, _, pairs, _ in panels for of in (heads, pairs))
        self._pass.narrow_row = max(of.inputs for _, out, _, down in panels for of in (out, down))

    @classmethod
    def can_run(cls, parts: Sequence[LayerParts], fields: Sequence[LayerFields]) -> bool:
        """Whether the layers have heads of one kind, and fields store rows as they are, on the device."""
        dtype = parts[0].norms[0][0].dtype
        heads = {(each.queries, each.keys, each.dim) for each in parts}
        every = [field for each in fields for field in (each.key, each.value)]
        return len(heads) == 1 and all(
            rows.dtype is dtype and kv_format is None and rows.dim() == 4 and not field.on_host
            for field in every
            for rows, _, kv_format in [field.stored]
        )

    def _layer(self, attention: NativeAttention, parts: LayerParts, fields: LayerFields) -> _Layer:
        query = torch.empty(1, parts.queries, parts.dim, dtype=self._dtype)
        call = attention.described(query, (fields.key, None, fields.value), parts.terms)
        call.window, call.chunked, call.out_format = parts.terms.window, parts.terms.chunked, call.query_format
        panels = [Panels.from_buffer_copy(product.panels) for product in parts.products]
        for each in panels:
            each.rows_format = FORMATS[self._dtype]
        first = (None, 0.0) if parts.first is None else (parts.first[0].data_ptr(), parts.first[1])
        weights = [first[0], *(weight.data_ptr() for weight, _ in parts.norms), None, None]
        epsilons = [first[1], *(eps for _, eps in parts.norms), 0.0]
        return _Layer(*panels, *weights[:4], *epsilons[:3], fields.group, call)

    def compute(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        batches: Sequence[PagedBatch],
        read: Tensor | None = None,
        kept: Mapping[int, Tensor] = _NOTHING,
    ) -> None:
        """Turn `hidden` `[T, width]`, contiguous, from what the embedding gave into what the last layer returns, with
        angles `cos` and `sin` `[T, dim]`. Keys and values are written as `batches` say.

        `read` `[T, inputs]`, contiguous, is what the first layer's queries, keys and values are computed from, if it
        has no `first` norm. `kept` `[T, width]`, by layer, get what these return.
        """
        made = [_group(batch) for batch in batches]
        groups = (_Group * len(made))(*(group for group, _ in made))
        step = _Pass.from_buffer_copy(self._pass)  # threads may share a model
        step.groups, step.hidden = ctypes.addressof(groups), hidden.data_ptr()
        step.cosines, step.sines = cos.data_ptr(), sin.data_ptr()
        step.read = None if read is None else read.data_ptr()
        if kept:
            places = (_P * len(self._layers))(
                *(kept[at].data_ptr() if at in kept else None for at in range(len(self._layers)))
            )
            step.kept = ctypes.addressof(places)
        step.rows, step.threads = hidden.shape[0], torch.get_num_threads()
        numbers = 2 * step.width + step.wide_row + step.narrow_row
        memory = hidden.new_empty(step.rows * numbers * hidden.element_size() + 5 * _LINE, dtype=torch.uint8)
        step.memory = -(-memory.data_ptr() // _LINE) * _LINE
        self._decode(ctypes.addressof(step))


def _group(batch: PagedBatch) -> tuple[_Group, list[npt.NDArray[np.int32] | None]]:
    """A batch for the library, and the arrays that it points to."""
    frames = np.ascontiguousarray(batch.frames, dtype=np.int32)
    given = batch.query_starts, batch.context_lens, frames, batch.parents, batch.slots
    arrays = [None if each is None else np.ascontiguousarray(each, dtype=np.int32) for each in given]
    places = (None if each is None else each.ctypes.data for each in arrays)
    return _Group(*places, frames.shape[1], len(batch.context_lens)), arrays
