"""Writes of new rows into a pool, in place."""

from __future__ import annotations

from torch import Tensor


def write_slots(pool_layer: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store `rows` `[T, ...]` at `slots` int64 `[T]` of `pool_layer` `[frames, page_size, ...]`, in place.

    Rows are converted to the pool's element type. Where a slot repeats (padding in frame 0), any of its rows may win.
    """
    pool_layer.flatten(0, 1).index_copy_(0, slots, rows.to(pool_layer.dtype))
