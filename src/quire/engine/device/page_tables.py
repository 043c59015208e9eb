"""DevicePageTables: the page tables of all running requests on the device, which a step updates by what changed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.moves import TORCH, Moves
from quire.kernels.page_arrays import StepTable
from quire.kernels.slots import Slots
from quire.memory.residency import PageTableChanges
from quire.spec.ids import Ids
from quire.upload import to_device

_NOTHING: Ids = np.empty(0, dtype=np.int32)


class DevicePageTables:
    """The frame of every page of every running request, int32 `[groups, rows + 1, pages_per_row]`: `tables` on
    `device`, and `host`. They are one memory on a CPU, unless `moves` are kernels.

    Addresses never change. Entries after a request's pages, and those of free rows, are stale: nothing reads them. The
    last row, `pad_row`, has frame 0 everywhere.
    """

    def __init__(
        self, num_groups: int, num_rows: int, pages_per_row: int, *, device: torch.device, moves: Moves = TORCH
    ) -> None:
        shape = (num_groups, num_rows + 1, pages_per_row)
        self.pad_row = num_rows
        self.host: Ids = np.zeros(shape, dtype=np.int32)
        self._flat = self.host.reshape(num_groups, (num_rows + 1) * pages_per_row)
        self._is_host = device.type == "cpu" and moves is TORCH
        self.tables = (
            torch.from_numpy(self.host) if self._is_host else torch.zeros(shape, dtype=torch.int32, device=device)
        )
        self._moves = moves
        self._number = 0
        self._pending = _NOTHING  # places that changed on the host and not on the device yet
        self._changed = _NOTHING
        self._kept: list[dict[Hashable, Any]] = [{} for _ in range(num_groups)]

    def sent(self, changes: PageTableChanges) -> Tensor | None:
        """Write the changes of the next step to `host`, and send them (`to_device`), for `apply`: int32 `[1 + groups,
        changes]`, places and frames. None if nothing is left to apply."""
        self._number += 1
        flat = self._flat
        if len(changes):
            flat[:, changes.places] = changes.frames
        if self._is_host:
            return None
        # A launch that failed may have sent changes that were not applied: they are sent again.
        places = np.union1d(self._pending, changes.places) if len(self._pending) else changes.places
        self._pending = self._changed = places
        if not len(places):
            return None
        entries = np.empty((1 + len(flat), len(places)), dtype=np.int32)
        entries[0], entries[1:] = places, flat[:, places]
        return to_device(entries, self.tables.device)

    def sent_again(self) -> Tensor | None:
        """For `apply`: an entry as it is, so that what applies changes is compiled. None on a CPU."""
        if self._is_host:
            return None
        entries = np.zeros((1 + len(self._flat), 1), dtype=np.int32)
        entries[1:] = self._flat[:, :1]
        return to_device(entries, self.tables.device)

    def apply(self, sent: Tensor | None) -> None:
        """Update the tables on the device by changes that have arrived, in one launch."""
        if sent is not None:
            self._moves.set_entries(self.tables, sent)
            self._pending = _NOTHING

    def frames(self, group: int, rows: Slots, width: int) -> Ids:
        """The first `width` entries of these rows, int32 `[len(rows), width]`, a copy on the host."""
        return self.host[group, :, :width][rows]

    def step(self, group: int, rows: Slots) -> StepTable | None:
        """The tables of a group for kernels that read them on the device, in the step whose changes were sent last.
        `rows` are those of its sequences. None if kernels read arrays of the host."""
        if self._is_host:
            return None
        return StepTable(self.tables[group], rows, self._number, self._changed, self._kept[group])
