"""Page tables on the device: one copy per step transfers what changed."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.memory.residency import PageTableChanges
from quire.spec.ids import Ids


class DevicePageTables:
    """The frame of every page of every running request, int32 `[groups, rows, pages_per_row]` on `device`. Entries
    after a request's pages, and those of free rows, are stale. Each of `num_steps` steps in flight has its own pinned
    buffer, so that none is written while a copy reads it."""

    def __init__(
        self, num_groups: int, num_rows: int, pages_per_row: int, *, device: torch.device, num_steps: int = 2
    ) -> None:
        self.tables = torch.zeros((num_groups, num_rows, pages_per_row), dtype=torch.int32, device=device)
        self._flat = self.tables.view(num_groups, num_rows * pages_per_row)
        self.host: Ids | None = self.tables.numpy() if device.type == "cpu" else None
        """The tables as an array if the device is the CPU; `apply` then writes without a copy."""
        self._pinned = device.type == "cuda"
        self._buffers = [self._buffer(1024) for _ in range(num_steps)]
        self._turn = 0

    def apply(self, changes: PageTableChanges) -> None:
        """Update the tables in one copy to the device, without waiting."""
        count = len(changes)
        if not count:
            return
        if self.host is not None:
            self._flat.numpy()[:, changes.places] = changes.frames
            return
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._buffers[self._turn].shape[1] < count:
            self._buffers[self._turn] = self._buffer(2 * count)
        staged = self._buffers[self._turn].view(-1)[: (1 + len(changes.frames)) * count]
        host = staged.numpy().reshape(1 + len(changes.frames), count)
        host[0] = changes.places
        host[1:] = changes.frames
        sent = staged.to(self.tables.device, non_blocking=True).view(1 + len(changes.frames), count)
        self._flat[:, sent[0].long()] = sent[1:]

    def rows(self, group: int, rows: Tensor, width: int) -> Tensor:
        """The first `width` entries of these rows, int32 `[len(rows), width]`, a copy on the device."""
        return self.tables[group, :, :width].index_select(0, rows)

    def _buffer(self, count: int) -> Tensor:
        return torch.empty((1 + len(self.tables), count), dtype=torch.int32, pin_memory=self._pinned)
