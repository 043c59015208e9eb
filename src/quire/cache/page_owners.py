"""PageOwners: whose each page is, and how many frames each owner has. Counts follow each change, at its cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.cache.running import Lengths
from quire.memory.residency import Column
from quire.memory.runs import IdArray
from quire.spec.ids import Ids
from quire.spec.rank import Rank


class PageOwners:
    """Owners by number, from 0 on. `of_page` is uint16 `[num_pages + 1]`; a page that is free has the last one."""

    def __init__(self, num_pages: int, num_owners: int) -> None:
        self.of_page = np.zeros(num_pages + 1, dtype=np.uint16)
        self.num_owners = num_owners
        self._columns: list[OwnedColumn] = []

    def column(self, name: str, num_pages: int, *, reclaims: bool) -> OwnedColumn:
        """A new column that counts for these owners."""
        self._columns.append(OwnedColumn(name, num_pages, reclaims=reclaims, owners=self))
        return self._columns[-1]

    def give(self, pages: Ids, owners: Any) -> None:
        """Pages, none of them idle, have another owner each, or all the same one."""
        for column in self._columns:
            column.count(pages[column.frame[pages] != 0], -1)
        self.of_page[pages] = owners
        for column in self._columns:
            column.count(pages[column.frame[pages] != 0], 1)

    def counts(self, pages: IdArray) -> Lengths:
        """How many of these pages are each owner's, int64 `[num_owners]`."""
        return np.bincount(self.of_page[pages], minlength=self.num_owners)


class OwnedColumn(Column):
    """A column in which `frames_by` counts frames by owner, int64 `[owners]`, and `idle_by` idle ones, int64 `[ranks,
    owners]`. `reclaim` takes those of one owner."""

    def __init__(self, name: str, num_pages: int, *, reclaims: bool, owners: PageOwners) -> None:
        super().__init__(name, num_pages, reclaims=reclaims)
        self.frames_by = np.zeros(owners.num_owners, dtype=np.int64)
        self.idle_by = np.zeros((len(Rank), owners.num_owners), dtype=np.int64)
        self._owner = owners.of_page

    def count(self, pages: Ids, change: int) -> None:
        """Owners have `change` frames more for each of these pages."""
        np.add.at(self.frames_by, self._owner[pages], change)

    def bind(self, pages: Ids, frames: Ids) -> None:
        super().bind(pages, frames)
        self.count(pages, 1)

    def unbind(self, pages: Ids) -> Ids:
        self.count(pages[self.frame[pages] != 0], -1)
        return super().unbind(pages)

    def move(self, old_pages: Ids, new_pages: Ids) -> None:
        super().move(old_pages, new_pages)
        self.count(old_pages, -1)
        self.count(new_pages, 1)

    def _unqueue(self, pages: Ids) -> None:
        idle = pages[self.ticket[pages] != 0]
        np.subtract.at(self.idle_by, (self.rank[idle], self._owner[idle]), 1)
        super()._unqueue(pages)

    def _queue(self, pages: Ids, owner: int = 0) -> None:
        owners = self._owner[pages]
        np.add.at(self.idle_by, (self.rank[pages], owners), 1)
        for each in np.unique(owners).tolist():
            super()._queue(pages[owners == each], each)
