"""Writes: which request wrote each slot last, at which position, and in which step; from the plans of steps.

Steps are noted as they are launched, and sorted in together later: a step costs one entry of a list.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.spec.ids import Bools, Ids

Longs = npt.NDArray[np.int64]

_POSITION_BITS = 32
_MOST_NOTED = 32  # steps


class Writes:
    """Writes to the slots of one group: `num_frames` frames of `page_size` tokens, and the padding frame 0. Requests
    have serial numbers from 1 on, which grow."""

    def __init__(self, num_frames: int, page_size: int) -> None:
        self._page_size = page_size
        self._offsets = np.arange(page_size, dtype=np.int64)
        self._keys: Longs = np.zeros((num_frames + 1, page_size), dtype=np.int64)  # serial and position; 0: none
        self._flat = self._keys.reshape(-1)
        self._steps: Longs = np.zeros(num_frames + 1, dtype=np.int64)
        self._noted: list[tuple[Ids, Longs, Longs, Longs, int]] = []

    @property
    def is_full(self) -> bool:
        """Whether `sort_in` should be called."""
        return len(self._noted) >= _MOST_NOTED

    def launched(self, step: int, slots: Ids, positions: Longs, serials: Longs, counts: Longs) -> None:
        """Step number `step` writes `slots`, at these positions; `counts[i]` of them belong to request `serials[i]`."""
        self._noted.append((slots, positions, serials, counts, step))

    def moved(self, sources: Ids, targets: Ids) -> None:
        """What was written to `sources` was copied to `targets`."""
        self.sort_in()
        self._flat[targets] = self._flat[sources]

    def moved_frames(self, sources: Ids, targets: Ids) -> None:
        """What was written to frames is in others now. After `sort_in`."""
        self._keys[targets], self._steps[targets] = self._keys[sources], self._steps[sources]

    def sort_in(self) -> tuple[Ids, Longs]:
        """Take over what was noted. Returns the frames that were written, and in which step, both in order of steps."""
        noted, self._noted = self._noted, []
        if not noted:
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
        slots = np.concatenate([each[0] for each in noted])
        serials = np.concatenate([each[2] for each in noted]).repeat(np.concatenate([each[3] for each in noted]))
        steps = np.repeat(np.array([each[4] for each in noted]), [len(each[0]) for each in noted])
        self._flat[slots] = (serials << _POSITION_BITS) + np.concatenate([each[1] for each in noted])
        frames = slots // np.int32(self._page_size)
        self._steps[frames] = steps
        return frames, steps

    def are_whole(self, frames: Ids, first: Longs, serials: Longs) -> Bools:
        """Per frame: whether request `serials[i]` wrote all its slots last, from position `first[i]` on. After
        `sort_in`."""
        expected = ((serials << _POSITION_BITS) + first)[:, None] + self._offsets
        found: Bools = (self._keys[frames] == expected).all(axis=1)
        return found

    def last(self, frame: int) -> tuple[int, int]:
        """The step that wrote a frame last, and the serial number of the request of its newest slot; 0 for none."""
        return int(self._steps[frame]), int(self._keys[frame].max()) >> _POSITION_BITS
