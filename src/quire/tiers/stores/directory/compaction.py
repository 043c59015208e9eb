"""Compaction: moves records from nearly empty slabs into slots of others, so that files can be removed.

    1  reserve slots in other slabs for invisible copies      a transaction
    2  copy the bytes, and flush them to the disk
    3  each row that still exists gives its name to its copy  a transaction

A process that dies on the way leaves unfinished records, as a writer does. A reader of an old place finds its row gone
and answers MISS.
"""

from __future__ import annotations

import functools

import numpy as np

from quire.tiers.stores.directory.index import Index, Row, find_visible, insert_rows, release, rows_where
from quire.tiers.stores.directory.room import Room
from quire.tiers.stores.directory.slab_files import SlabFiles
from quire.tiers.stores.directory.transfer import Transfer

_AT_ONCE_BYTES = 32 << 20

_EMPTIED = """
SELECT id, slot_bytes, num_slots FROM (
    SELECT s.id, s.slot_bytes, s.num_slots, COUNT(r.id) AS num_records, COUNT(r.owner) AS num_written,
        SUM(s.num_slots - COUNT(r.id)) OVER (PARTITION BY s.slot_bytes) AS num_free
    FROM slabs s LEFT JOIN records r ON r.slab = s.id GROUP BY s.id
) WHERE num_written = 0 AND num_free >= num_slots ORDER BY 1.0 * num_records / num_slots
"""
"""Slabs without unfinished records, whose records fit into other slabs: the least full first. O(records)."""


class Compaction:
    """Empties slabs for one opened store. Raises Busy where the index cannot be written."""

    def __init__(self, index: Index, room: Room, files: SlabFiles, transfer: Transfer, owner: str) -> None:
        self._index = index
        self._room = room
        self._files = files
        self._transfer = transfer
        self._owner = owner

    def run(self) -> None:
        """Compact until no slab's records fit into others. Each slab is tried once, whatever others write meanwhile."""
        tried: set[int] = set()
        while True:
            with self._index.reading as index:
                slabs = [slab for slab in index.execute(_EMPTIED) if slab[0] not in tried]
            if not slabs:
                return
            slab, slot_bytes, num_slots = slabs[0]
            tried.add(slab)
            most = max(1, _AT_ONCE_BYTES // slot_bytes)
            for _ in range(-(-num_slots // most)):
                if not self._move(slab, slot_bytes, most):
                    break

    def _move(self, slab: int, slot_bytes: int, most: int) -> bool:
        """Move some records of a slab, and drop it when it is empty. False: nothing is left to do."""
        with self._index.writing() as index:
            if self._room.drop_if_empty(index, slab):
                return False
            old = rows_where(index, "slab = ? AND owner IS NULL ORDER BY slot LIMIT ?", (slab, most))
            places = self._room.take_unused(index, slot_bytes, len(old), slab)
            old = old[: len(places)]
            # with a name that no key has
            copies = [
                row._replace(name=b"moved" + row.id.to_bytes(8, "big"), slab=place[0], slot=place[1], owner=self._owner)
                for row, place in zip(old, places, strict=True)
            ]
            new = insert_rows(index, copies)
        copied: set[int] = set()
        try:
            copied = self._copy(old, new)
        finally:
            with self._index.writing() as index:
                there = find_visible(index, [row.id for row in old])
                good = [(a, b) for a, b in zip(old, new, strict=True) if b.id in copied and a.id in there]
                release(index, (row.id for row, _ in good))
                index.executemany(
                    "UPDATE records SET name = ?, owner = NULL WHERE id = ? AND owner = ?",
                    [(before.name, after.id, after.owner) for before, after in good],
                )
                release(index, {row.id for row in new} - {after.id for _, after in good})
                is_empty = self._room.drop_if_empty(index, slab)
        return bool(copied) and not is_empty

    def _copy(self, old: list[Row], new: list[Row]) -> set[int]:
        """The ids of copies that are on the disk."""
        file_of = functools.cache(self._files.open)
        moving = []
        for source, target in zip(old, new, strict=True):
            files = file_of(source.slab), file_of(target.slab)
            if files[0] is not None and files[1] is not None:
                memory = np.empty(source.num_bytes, dtype=np.uint8)
                moving.append((target, (files[0], source.offset, memory), (files[1], target.offset, memory)))
        read = self._transfer.read([source for _, source, _ in moving])
        moving = [each for each, done in zip(moving, read, strict=True) if done]
        written = self._transfer.write([target for _, _, target in moving])
        done = [row for (row, _, _), is_done in zip(moving, written, strict=True) if is_done]
        self._files.sync({row.slab for row in done})
        return {row.id for row in done}
