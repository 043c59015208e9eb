"""RunningBatch: requests that go on together, so that a step costs array arithmetic and no loop over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.cache.request_kv import RequestKV
from quire.spec.ids import Ids

Lengths = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]


class RunningBatch:
    """What `KVCache.batch` makes of running requests, for `extend`, `slots`, `page_table` and `launch`, for as long as
    none of them ends.

    It remembers from one step to the next how long each request is and where its last token lives, in each group whose
    frames follow the pages; `epoch` says which state of the cache that is of. The cache alone writes it.
    """

    __slots__ = ("ended", "epoch", "filled", "kvs", "last", "lengths", "room", "rows", "slots")

    def __init__(self, kvs: Sequence[RequestKV], rows: Rows) -> None:
        self.kvs = kvs
        self.rows = rows
        self.epoch = -1  # nothing below is known yet
        self.ended = -1
        self.lengths: Lengths = np.empty(0, dtype=np.int64)  # tokens that each has room for
        self.filled: Lengths = self.lengths  # of these, the ones in its last page; a whole page where it has none
        self.last: Ids = np.empty(0, dtype=np.int32)  # slot of the last of these in the page's own ids; -1 for none
        self.slots: list[Ids] = []  # per group, the slot of each one's last token
        self.room = 0  # tokens that the longest may still grow

    def __len__(self) -> int:
        return len(self.rows)
