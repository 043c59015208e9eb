"""Compaction: records move from slabs that are nearly empty into slots of others, so that their files can go.

    1  slots elsewhere are taken for rows of our own, which nobody sees    a transaction
    2  the bytes are copied, and are on the disk
    3  each row that is still the same gives its name to the copy          a transaction

Whoever dies on the way leaves rows of a dead owner, as a writer does. Whoever reads an old place meanwhile finds its
row gone afterwards, and says MISS.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from typing import NamedTuple

import numpy as np

from quire.tiers.stores.directory.index import Index, Row, insert_rows, release, rows_in
from quire.tiers.stores.directory.room import Room
from quire.tiers.stores.directory.slab_files import OpenSlabs, SlabFiles
from quire.tiers.stores.directory.transfer import Transfer

_AT_ONCE_BYTES = 32 << 20

_SLABS = """
SELECT s.id, s.slot_bytes, s.num_slots, COUNT(r.id), COUNT(r.owner) FROM slabs s LEFT JOIN records r ON r.slab = s.id
GROUP BY s.id
"""


class _Slab(NamedTuple):
    id: int
    slot_bytes: int
    num_slots: int
    num_records: int
    num_written: int  # of these, by others and not complete


class Compaction:
    """Empties slabs for one opened store. Raises Busy where the index cannot be written."""

    def __init__(self, index: Index, room: Room, files: SlabFiles, transfer: Transfer, owner: str) -> None:
        self._index = index
        self._room = room
        self._files = files
        self._transfer = transfer
        self._owner = owner

    def run(self) -> None:
        """Until no slab's records have room in others. Each slab is tried once, whatever others write meanwhile."""
        tried: set[int] = set()
        while (slab := self._sparsest(tried)) is not None:
            tried.add(slab.id)
            most = max(1, _AT_ONCE_BYTES // slab.slot_bytes)
            for _ in range(-(-slab.num_slots // most)):
                if not self._move(slab, most):
                    break

    def _sparsest(self, tried: set[int]) -> _Slab | None:
        """The slab that is least full, if others have room for all of it. O(records)."""
        with self._index.writing() as index:
            slabs = [_Slab(*row) for row in index.execute(_SLABS)]
        room: Counter[int] = Counter()
        for slab in slabs:
            room[slab.slot_bytes] += slab.num_slots - slab.num_records
        can_go = [
            slab
            for slab in slabs
            if slab.id not in tried
            and not slab.num_written
            and room[slab.slot_bytes] - (slab.num_slots - slab.num_records) >= slab.num_records
        ]
        return min(can_go, key=lambda slab: slab.num_records / slab.num_slots, default=None)

    def _move(self, slab: _Slab, most: int) -> bool:
        """Some records of it, and the slab when it is empty. False: that is all there is to do."""
        with self._index.writing(self._room.settle) as index:
            if self._room.drop_if_empty(index, slab.id):
                return False
            old = rows_in(index, slab.id, most)
            places = self._room.take_elsewhere(index, slab.slot_bytes, len(old), slab.id)
            old = old[: len(places)]
            new = insert_rows(index, [self._copy_of(row, *place) for row, place in zip(old, places, strict=True)])
        copied: set[int] = set()
        try:
            copied = self._copy(old, new)
        finally:
            with self._index.writing(self._room.settle) as index:
                self._settle(index, old, new, copied)
                is_empty = self._room.drop_if_empty(index, slab.id)
        return bool(copied) and not is_empty

    def _copy_of(self, row: Row, slab: int, slot: int) -> Row:
        """The row of a copy, under a name that no key has."""
        return row._replace(name=b"moved" + row.id.to_bytes(8, "big"), slab=slab, slot=slot, owner=self._owner)

    def _copy(self, old: list[Row], new: list[Row]) -> set[int]:
        """Which copies are on the disk, by id."""
        opened = OpenSlabs(self._files)
        moving = []
        for source, target in zip(old, new, strict=True):
            files = opened[source.slab], opened[target.slab]
            if files[0] is not None and files[1] is not None:
                moving.append((source, files[0], target, files[1], np.empty(source.num_bytes, dtype=np.uint8)))
        read = self._transfer.read([(file, row.offset, memory) for row, file, _, _, memory in moving])
        moving = [each for each, done in zip(moving, read, strict=True) if done]
        written = self._transfer.write([(file, row.offset, memory) for _, _, row, file, memory in moving])
        done = [row for (_, _, row, _, _), is_done in zip(moving, written, strict=True) if is_done]
        self._files.sync({row.slab for row in done})
        return {row.id for row in done}

    @staticmethod
    def _settle(index: sqlite3.Connection, old: list[Row], new: list[Row], copied: set[int]) -> None:
        there = {row.id for row in rows_in(index, old[0].slab)} if old else set()
        good = [(a, b) for a, b in zip(old, new, strict=True) if b.id in copied and a.id in there]
        release(index, (row.id for row, _ in good))
        index.executemany(
            "UPDATE records SET name = ?, owner = NULL WHERE id = ? AND owner = ?",
            [(before.name, after.id, after.owner) for before, after in good],
        )
        kept = {after.id for _, after in good}
        release(index, (row.id for row in new if row.id not in kept))
