"""StoredRows: one field of one layer as kernels write and read it, a row of numbers per slot of a pool. Encoded rows
are decoded as they are read, into scratch memory; plain ones are read in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.codec import decode, encode
from quire.kernels.workspace import Workspace
from quire.spec.kv_format import KVFormat

_workspace = Workspace()


class StoredRows:
    """The rows of `frames` `[frames, entries, *stored]`, a pool's layer, by slot (`frame * entries + offset`).

    A row is `shape` numbers. With `kv_format` it is stored encoded: `stored` is what `shape` takes, and `scales`
    `[frames, entries, *scale_shape]` is the layer of its scales, if the format has any; entries beyond a row's own
    scales are padding. `name` keeps the scratch memory of `read` apart from that of other fields.
    """

    __slots__ = ("_kv_format", "_name", "_rows", "_scales")

    def __init__(
        self,
        frames: Tensor,
        scales: Tensor | None = None,
        kv_format: KVFormat | None = None,
        *,
        name: str = "rows",
    ) -> None:
        self._rows = frames.flatten(0, 1)
        self._kv_format = kv_format
        self._name = name
        self._scales: Tensor | None = None
        if kv_format is not None:
            assert (scales is not None) == (kv_format.scale is not None), f"{kv_format.name} and its scales"
        if kv_format is not None and scales is not None:
            width = frames.shape[-1] * frames.element_size() * 8 // kv_format.bits
            self._scales = scales.flatten(0, 1)[..., : kv_format.scale_width(width)]

    def write(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Store `rows` `[T, *shape]` at `slots` int64 `[T]`; returns them as a reader of the slots will see them.

        They are rounded as they are stored, so that a row is the same in the step that writes it and in every later
        one. Where a slot repeats (padding in frame 0), any of its rows may win.
        """
        if self._kv_format is None:
            stored = rows.to(self._rows.dtype)
            self._rows.index_copy_(0, slots, stored)
            return stored.to(rows.dtype)
        stored, scales = encode(rows, self._kv_format)
        _bytes_of(self._rows).index_copy_(0, slots, _bytes_of(stored))
        if self._scales is not None and scales is not None:
            _bytes_of(self._scales).index_copy_(0, slots, _bytes_of(scales))
        return decode(stored, scales, self._kv_format, rows.dtype)

    def read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows of consecutive slots `[stop - start, *shape]`, in place where they are stored in `dtype`.

        Encoded rows are decoded into scratch memory, valid until the next read of a field of this name.
        """
        rows = self._rows[start:stop]
        if self._kv_format is None:
            return rows.to(dtype)
        scales = None if self._scales is None else self._scales[start:stop]
        return self._decoded(rows, scales, dtype, f"{self._name} read")

    def gather(self, index: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        """Rows of slots `index` int64 `[n]`, `[n, *shape]`, in scratch memory `name`: valid until its next use."""
        rows = _gathered(self._rows, index, name)
        if self._kv_format is None:
            return rows.to(dtype)
        scales = None if self._scales is None else _gathered(self._scales, index, f"{name} scales")
        return self._decoded(rows, scales, dtype, f"{name} gathered")

    def _decoded(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype, name: str) -> Tensor:
        """Encoded rows in `dtype`, in scratch memory `name`."""
        assert self._kv_format is not None
        width = rows.shape[-1] * 8 // self._kv_format.bits
        out = _workspace.take(name, dtype, rows.device, *rows.shape[:-1], width)
        return decode(rows, scales, self._kv_format, dtype, out)


def _bytes_of(rows: Tensor) -> Tensor:
    """Elements of one byte as integers, which every device can copy by index."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _gathered(rows: Tensor, index: Tensor, name: str) -> Tensor:
    out = _workspace.take(name, rows.dtype, rows.device, len(index), *rows.shape[1:])
    torch.index_select(_bytes_of(rows), 0, index, out=_bytes_of(out))
    return out
