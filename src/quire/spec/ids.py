"""Arrays of ids on the host, and the tiers where frames are."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""Host array of ids. Every id is int32 on the CPU."""

Bools = npt.NDArray[np.bool_]


class Tier(IntEnum):
    """Tiers with frames, nearest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2
