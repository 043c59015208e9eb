"""Pool: the tensors that hold the frames of one group, of any layout, on the device; HostedPool: in host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.errors import HostMemoryError, PlanError, UnsupportedModel
from quire.memory.host_pool import HostPool, populate, reserve, touch
from quire.memory.record import HEADER_BYTES
from quire.spec.layout import DType, Field, PageLayout

_LARGE = 4 * 2**20
"""Size in bytes from which a tensor uses huge pages."""


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch element type of a layout's element type."""
    found = getattr(torch, dtype.value)
    assert isinstance(found, torch.dtype)
    return found


class Arriving(Protocol):
    """A load of bytes into frames, layer by layer."""

    def wait_layer(self, layer: int) -> None:
        """Wait until the bytes of the layer have arrived."""


class Pool:
    """Device tensors for frames `0..num_frames` of a layout, zero at start; padded tokens write to frame 0. Large host
    memory that is not `touched` is provided by the system when it is written, or by `populate`. `tensors` has each
    field in the order of the layout with its tensor, `[layers, num_frames + 1, entries, *shape]`."""

    on_host = False  # whether the frames are records of host memory

    def __init__(
        self, layout: PageLayout, num_frames: int, *, device: torch.device | str = "cpu", touched: bool = True
    ) -> None:
        self.layout = layout
        self.num_frames = num_frames
        self.device = torch.device(device)
        self._touched = touched
        self.arriving: Sequence[Arriving] = ()  # loads that the step being launched reads, layer by layer
        try:
            self.tensors = tuple((field, self._zeros(field)) for field in layout.fields)
        except (RuntimeError, MemoryError, HostMemoryError) as error:
            raise PlanError(
                f"the KV pool of {num_frames + 1} frames of {layout.bytes_per_frame} bytes could not be allocated on "
                f"{self.device}: {error}",
                fix="lower the KV memory.",
            ) from error

        self._owned = self._by_layer()

    def _by_layer(self) -> dict[tuple[str, int], tuple[Field, Tensor]]:
        return {
            (field.name, layer): (field, tensor[index])
            for field, tensor in self.tensors
            for index, layer in enumerate(field.layers)
        }

    def _zeros(self, field: Field) -> Tensor:
        shape = (len(field.layers), self.num_frames + 1, field.entries(self.layout.page_size), *field.shape)
        dtype = torch_dtype(field.dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.device.type != "cpu" or num_bytes < _LARGE:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # Reads of scattered frames touch many system pages; huge pages cause far fewer TLB misses.
        memory = torch.frombuffer(reserve(num_bytes), dtype=torch.uint8)
        if self._touched:
            touch(memory.numpy())
        return memory.view(dtype).view(shape)

    def populate(self) -> Iterator[None]:
        """Make the system provide the host memory of the pool piece by piece, also while it is in use."""
        for _, tensor in self.tensors:
            if tensor.nbytes >= _LARGE:
                yield from populate(tensor.view(torch.uint8).flatten().numpy())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, frame 0 included."""
        return sum(tensor.nbytes for _, tensor in self.tensors)

    def layer(self, name: str, layer: int) -> Tensor:
        """`[num_frames + 1, entries, *shape]` of one layer, a view, after all `arriving` loads of that layer. Raises
        the error of a failed load."""
        for load in self.arriving:
            load.wait_layer(layer)
        return self._owned[name, layer][1]

    def field(self, name: str, layer: int) -> Field:
        """The field `name` that `layer` owns."""
        return self._owned[name, layer][0]

    def has(self, name: str, layer: int) -> bool:
        """Whether `layer` owns a field `name` in this pool."""
        return (name, layer) in self._owned


class HostedPool(Pool):
    """The frames of one group as tensors on the CPU, views of its records in `host`, which owns the memory. Frame i is
    record i. A record has a header and may have a gap behind its fields, so tensors are strided: entries of a frame are
    contiguous, and frames are not. `reader` is the device that computes and reads rows. Raises UnsupportedModel for a
    layout whose fields are not aligned in a record."""

    on_host = True

    def __init__(self, layout: PageLayout, host: HostPool, group: int, *, reader: torch.device) -> None:
        rows = torch.from_numpy(host.rows(group))
        assert host.format(group).payload_bytes == layout.bytes_per_frame, "a host pool of other layouts"
        self.layout = layout
        self.num_frames = len(rows) - 1
        self.device = rows.device
        self.reader = reader
        self.arriving = ()
        self.buffers: Any = None
        """What fills hot buffers from this pool, if anything does."""
        self.buffer_bytes = 0
        found, start = [], HEADER_BYTES
        for field in layout.fields:
            dtype, shape = torch_dtype(field.dtype), (len(field.layers), field.entries(layout.page_size), *field.shape)
            size = torch.Size(shape).numel() * dtype.itemsize
            if start % dtype.itemsize:
                raise UnsupportedModel(
                    f"field '{field.name}' begins at byte {start} of a record, which {dtype.itemsize} does not divide: "
                    "it cannot be read in host memory.",
                    fix="use a larger page size, or leave hisparse out.",
                )
            found.append((field, rows[:, start : start + size].view(dtype).view(-1, *shape).transpose(0, 1)))
            start += size
        self.tensors = tuple(found)
        self._owned = self._by_layer()

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory: those of its hot buffers."""
        return self.buffer_bytes

    def populate(self) -> Iterator[None]:
        """The host pool is touched already."""
        return iter(())
