"""Names for the integers of the system. They are all plain ints at run time; the type checker keeps them apart."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NewType

import numpy as np
import numpy.typing as npt

PageId = NewType("PageId", int)
"""Logical id of `page_size` consecutive tokens of one prefix. What requests and the tree hold."""

FrameId = NewType("FrameId", int)
"""Physical place of a page's bytes in the pool of one (tier, group)."""

SlotId = NewType("SlotId", int)
"""One token's place: `page * page_size + offset`, for a page id or a frame id alike."""

GroupId = NewType("GroupId", int)
"""Index of a group in `ModelSpec.groups`."""

Ids = npt.NDArray[np.int32]
"""Host array of ids. Every id lives in int32 on the CPU."""

Bools = npt.NDArray[np.bool_]


class Tier(IntEnum):
    """Where frames live, nearest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


PADDING_PAGE: Final = PageId(0)
"""Never handed out: padded tokens write here, and a frame-table entry of 0 means 'not resident'."""
