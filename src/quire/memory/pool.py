"""Pool: the tensors that hold the frames of one group, of any layout. A frame is one piece, as in a record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.errors import UnsupportedModel
from quire.memory.backing import Backing, backing_of
from quire.spec.layout import DType, Field, PageLayout


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch element type of a layout's element type."""
    found = getattr(torch, dtype.value)
    assert isinstance(found, torch.dtype)
    return found


class Pool:
    """Frames `0..num_frames` of a layout; padded tokens write to frame 0. Frame i is `rows[i]` of uint8 `[num_frames +
    1, bytes_per_frame]`: all fields in the order of the layout, each `[layers, entries, *shape]`. `tensors` has each
    field with its part of all frames, a view `[layers, num_frames + 1, entries, *shape]`. Entries of one frame are
    contiguous, and frames are not: `flatten` and `reshape` over frames copy, and writes to a copy are lost.

    Without `rows` the pool allocates them (`backing_of`). With `rows`, such as records in host memory, another object
    owns the memory, and `backing` is what it gave. A `reader` is another device that computes on frames in host memory.
    Raises UnsupportedModel if fields are not aligned."""

    def __init__(
        self,
        layout: PageLayout,
        num_frames: int = 0,
        *,
        device: torch.device | str = "cpu",
        touched: bool = True,
        rows: Tensor | None = None,
        backing: Backing | None = None,
        reader: torch.device | None = None,
    ) -> None:
        self.layout = layout
        size = layout.bytes_per_frame
        if rows is None:
            num_bytes = (num_frames + 1) * size
            backing = backing_of(num_bytes, torch.device(device), touched=touched)
            rows = backing.tensor.view(num_frames + 1, size)
        self.backing = backing or Backing(rows)
        assert rows.shape[1] == layout.bytes_per_frame, "frames of another layout"
        self.rows = rows
        self.num_frames = len(rows) - 1
        self.device = rows.device
        self.reader = reader
        self.buffers: Any = None
        """What fills hot buffers from this pool, if anything does."""
        self.buffer_bytes = 0
        self.tensors = tuple(self._views())
        self._owned = {
            (field.name, layer): (field, tensor[index])
            for field, tensor in self.tensors
            for index, layer in enumerate(field.layers)
        }

    @property
    def on_host(self) -> bool:
        """Whether the frames are in host memory, and a device reads them there."""
        return self.reader is not None

    def _views(self) -> Iterator[tuple[Field, Tensor]]:
        start, stride = 0, self.rows.stride(0)
        for field in self.layout.fields:
            dtype = torch_dtype(field.dtype)
            size = field.bytes_per_frame(self.layout.page_size)
            if any(number % dtype.itemsize for number in (self.rows.storage_offset() + start, stride)):
                raise UnsupportedModel(
                    f"field '{field.name}' begins at byte {start} of frames that are {stride} bytes apart, which "
                    f"{dtype.itemsize} does not divide: it cannot be read in place.",
                    fix="use a larger page size.",
                )
            shape = (len(field.layers), field.entries(self.layout.page_size), *field.shape)
            yield field, self.rows[:, start : start + size].view(dtype).view(-1, *shape).transpose(0, 1)
            start += size

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes of its device, frame 0 included; of a pool in host memory, those of its hot buffers."""
        return self.buffer_bytes if self.on_host else self.rows.nbytes

    def layer(self, name: str, layer: int) -> Tensor:
        """`[num_frames + 1, entries, *shape]` of one layer, a view."""
        return self._owned[name, layer][1]

    def field(self, name: str, layer: int) -> Field:
        """The field `name` that `layer` owns."""
        return self._owned[name, layer][0]

    def has(self, name: str, layer: int) -> bool:
        """Whether `layer` owns a field `name` in this pool."""
        return (name, layer) in self._owned
