"""The rows of running requests: their pages, their lengths, and requests that go on together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.cache.request_kv import RequestKV
from quire.memory.residency import PageTableChanges
from quire.spec.ids import Ids

Lengths = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]
_NO_PLACES: Rows = np.empty(0, dtype=np.intp)


class RunningBatch:
    """Running requests, each once, for the verbs of a step (`RunningTables.batch`), for as long as none of them ends: a
    verb costs array arithmetic and no loop over them. `serials` tell whether a row is still that request's."""

    __slots__ = ("kvs", "rows", "serials")

    def __init__(self, kvs: Sequence[RequestKV], rows: Rows, serials: Lengths) -> None:
        self.kvs = kvs
        self.rows = rows
        self.serials = serials

    def __len__(self) -> int:
        return len(self.rows)


class RowTable:
    """Page ids int32 `[rows, width]`; per row how many tokens it has room for, how many of them have settled, and the
    serial number of its request, 0 for none.

    With `follows`, it remembers which entries were written until `changes` is asked for.
    """

    def __init__(self, num_rows: int, width: int, *, follows: bool) -> None:
        self.width = width
        self.pages: Ids = np.zeros((num_rows, width), dtype=np.int32)
        self.flat: Ids = self.pages.reshape(-1)  # a view
        self.allocated: Lengths = np.zeros(num_rows, dtype=np.int64)
        self.committed: Lengths = np.zeros(num_rows, dtype=np.int64)
        self.serials: Lengths = np.zeros(num_rows, dtype=np.int64)
        self.free = list(range(num_rows - 1, -1, -1))
        self._written: list[Rows | range] | None = [] if follows else None

    def write_run(self, row: int, start: int, pages: Ids) -> None:
        """These pages are those of a row from its page `start` on."""
        self.pages[row, start : start + len(pages)] = pages
        if self._written is not None and len(pages):
            first = row * self.width + start
            self._written.append(range(first, first + len(pages)))

    def write(self, places: Rows, pages: Ids) -> None:
        """These pages are at these places of `flat`, each named once."""
        self.flat[places] = pages
        if self._written is not None:
            self._written.append(places)

    def changes(self, columns: Sequence[Ids]) -> PageTableChanges:
        """What was written since the last call, each place once, as it is now in these columns of the residency table.
        O(entries written)."""
        assert self._written is not None, "a table that does not follow what is written has no changes to tell"
        written, self._written = self._written, []
        parts = [np.arange(p.start, p.stop) if isinstance(p, range) else p for p in written or [_NO_PLACES]]
        places = parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))
        pages = self.flat[places]
        frames = np.empty((len(columns), len(places)), dtype=np.int32)
        for group, column in enumerate(columns):
            frames[group] = column[pages]
        return PageTableChanges(places.astype(np.int32), frames)
