"""Arithmetic of slots, positions and flat rows: int64 arrays on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]


def flatten_ranges(starts: Slots, stops: Slots) -> Slots:
    """`starts[0]:stops[0]`, then `starts[1]:stops[1]`, ... as one array."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    if not len(ends):
        return np.zeros(0, dtype=np.int64)
    flat: Slots = np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return flat
