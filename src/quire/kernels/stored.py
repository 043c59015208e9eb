"""StoredRows: one field of one layer as kernels write and read it: a row of numbers per slot of a pool, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.workspace import Workspace

_workspace = Workspace()


class StoredRows:
    """The rows of `frames` `[frames, entries, *shape]`, a pool's layer, by slot (`frame * entries + offset`)."""

    __slots__ = ("_rows",)

    def __init__(self, frames: Tensor) -> None:
        self._rows = frames.flatten(0, 1)

    def write(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Store `rows` `[T, *shape]` at `slots` int64 `[T]`; returns them as a reader of the slots will see them.

        Where a slot repeats (padding in frame 0), any of its rows may win.
        """
        self._rows.index_copy_(0, slots, rows.to(self._rows.dtype))
        return rows

    def read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows of consecutive slots `[stop - start, *shape]`, in place where they are stored in `dtype`."""
        return self._rows[start:stop].to(dtype)

    def gather(self, index: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        """Rows of slots `index` int64 `[n]`, `[n, *shape]`, in scratch memory `name`: valid until its next use."""
        out = _workspace.take(name, self._rows.dtype, self._rows.device, len(index), *self._rows.shape[1:])
        return torch.index_select(self._rows, 0, index, out=out).to(dtype)
