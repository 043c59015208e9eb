"""Runs: ids that follow one another. What indexes arrays by them reads and writes memory in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.spec.ids import Ids

IdArray = npt.NDArray[np.signedinteger[Any]]

_FEW = 32
_LONG = 4096
_UP = np.arange(_LONG, dtype=np.int32).tobytes()


def is_ascending(ids: IdArray) -> bool:
    """Whether each id is above the one before it, so that none is named twice."""
    return int(np.count_nonzero(ids[1:] > ids[:-1])) >= len(ids) - 1


def as_run(ids: IdArray, ascending: bool | None = None) -> slice | None:
    """The ids as a slice where each is the one before it plus one; None where not, or where there are few of them.
    `ascending` says what is known of them."""
    count = len(ids)
    if count < _FEW:
        return None
    first = int(ids[0])
    if first < 0 or int(ids[-1]) - first != count - 1:
        return None
    if ascending is None:
        if count <= _LONG and ids.dtype == np.int32:  # half the time of a look at each
            ascending = (ids - np.int32(first)).tobytes() == _UP[: 4 * count]
        else:
            ascending = is_ascending(ids)
    return slice(first, first + count) if ascending else None


def in_order(ids: Ids) -> Ids:
    """The ids in ascending order: as they are where they come so, as those of one prompt mostly do."""
    return ids if is_ascending(ids) else np.sort(ids)
