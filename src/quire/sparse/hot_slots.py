"""Which token each slot of the hot buffers has, and which slots were used least recently. Arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.spec.ids import Ids


@dataclass(frozen=True, slots=True)
class SwapIn:
    """`slots` has the buffer slot of each selected position (`buffer_size`: the newest token; 0 where there is none),
    int32 `[n, k]`. The flat arrays are the tokens that the buffers lacked: the caller copies `position` of cache row
    `row` from host memory to `slot`."""

    slots: Ids
    row: Ids
    position: Ids
    slot: Ids


class HotSlots:
    """The hot buffers of one engine: `num_indexes` per cache row, all empty at first."""

    def __init__(self, num_indexes: int, num_rows: int, buffer_size: int) -> None:
        self.buffer_size = buffer_size
        self.hit_tokens = self.swapped_tokens = 0
        self._held = np.full((num_indexes, num_rows, buffer_size), -1, dtype=np.int32)
        self._used = np.zeros((num_indexes, num_rows, buffer_size), dtype=np.int64)
        self._clock = 0

    def swap_in(self, index: int, rows: Ids, positions: Ids, newest: npt.NDArray[np.int64]) -> SwapIn:
        """Make room for what one token of each row selects: `positions` `[n, k]`, -1 for none, which differ, and are at
        most `newest`, the position of the row's last token. Rows differ."""
        slots = np.zeros(positions.shape, dtype=np.int32)
        self._clock += 1
        misses: list[tuple[int, int, int]] = []
        for at, row in enumerate(rows.tolist()):
            held, used, wanted = self._held[index, row], self._used[index, row], positions[at]
            slots[at, wanted == newest[at]] = self.buffer_size
            old = (wanted >= 0) & (wanted != newest[at])
            found = held[:, None] == np.where(old, wanted, -2)
            slot, column = np.nonzero(found)
            slots[at, column], used[slot] = slot, self._clock
            missing = np.flatnonzero(old & ~found.any(axis=0))
            taken = np.argsort(used, kind="stable")[: len(missing)]
            held[taken], used[taken], slots[at, missing] = wanted[missing], self._clock, taken
            misses += [(row, int(wanted[place]), int(new)) for place, new in zip(missing, taken, strict=True)]
            self.hit_tokens += len(column)
        self.swapped_tokens += len(misses)
        return SwapIn(slots, *np.array(misses, dtype=np.int32).reshape(-1, 3).T)

    def forget(self, rows: Ids) -> None:
        """A request begins or has ended in these rows: their buffers are empty."""
        self._held[:, rows] = -1
        self._used[:, rows] = 0
