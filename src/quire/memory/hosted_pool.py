"""HostedPool: a pool whose frames are records of a HostPool, for a group whose pages are always in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quire.errors import UnsupportedModel
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool, torch_dtype
from quire.memory.record import HEADER_BYTES
from quire.spec.layout import PageLayout


class HostedPool(Pool):
    """The frames of one group as tensors on the CPU, views of its records in `host`, which owns the memory. Frame i is
    record i. A record has a header and may have a gap behind its fields, so tensors are strided: entries of a frame are
    contiguous, and frames are not. `reader` is the device that computes and reads rows. Raises UnsupportedModel for a
    layout whose fields are not aligned in a record."""

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
