"""Compaction: moves records from nearly empty slabs into slots of others, so that files can be removed.

    1  reserve slots in other slabs for invisible copies      a transaction
    2  copy the bytes, and flush them to the disk
    3  each row that still exists gives its name to its copy  a transaction

If a process dies in between, it leaves unfinished records, as a writer does. A reader of an old place finds its row
deleted and answers MISS.
"""

from __future__ import annotations

import numpy as np

from quire.tiers.stores.directory.index import Index, Row, find_visible, insert_rows, release, rows_where
from quire.tiers.stores.directory.slab_allocator import SlabAllocator
from quire.tiers.stores.directory.slab_files import SlabFiles

_AT_ONCE_BYTES = 32 << 20

_EMPTIED = """
SELECT id, slot_bytes, num_slots FROM (
    SELECT s.id, s.slot_bytes, s.num_slots, COUNT(r.id) AS num_records, COUNT(r.owner) AS num_written,
        SUM(s.num_slots - COUNT(r.id)) OVER (PARTITION BY s.slot_bytes) AS num_free
    FROM slabs s LEFT JOIN records r ON r.slab = s.id GROUP BY s.id
) WHERE num_written = 0 AND num_free >= num_slots ORDER BY 1.0 * num_records / num_slots
"""
"""Slabs without unfinished records, whose records fit into other slabs: the least full first. O(records)."""


def compact(index: Index, allocator: SlabAllocator) -> None:
    """Empty slabs until no slab's records fit into others. Each slab is tried once, whatever others write meanwhile.
    Raises Busy if the index cannot be written."""
    tried: set[int] = set()
    while True:
        with index.reading() as connection:
            slabs = [slab for slab in connection.execute(_EMPTIED) if slab[0] not in tried]
        if not slabs:
            return
        slab, slot_bytes, num_slots = slabs[0]
        tried.add(slab)
        most = max(1, _AT_ONCE_BYTES // slot_bytes)
        for _ in range(-(-num_slots // most)):
            if not _move(index, allocator, slab, slot_bytes, most):
                break


def _move(index: Index, allocator: SlabAllocator, slab: int, slot_bytes: int, most: int) -> bool:
    """Move some records of a slab, and remove the slab when it is empty. Returns False when nothing is left to do."""
    with index.writing() as connection:
        if allocator.drop_if_empty(connection, slab):
            return False
        old = rows_where(connection, "slab = ? AND owner IS NULL ORDER BY slot LIMIT ?", (slab, most))
        slots = allocator.alloc_unused(connection, slot_bytes, len(old), slab)
        old = old[: len(slots)]
        owner = allocator.owners.name
        # with a name that no key has
        copies = [
            row._replace(name=b"moved" + row.id.to_bytes(8, "big"), slab=place[0], slot=place[1], owner=owner)
            for row, place in zip(old, slots, strict=True)
        ]
        new = insert_rows(connection, copies)
    copied: set[int] = set()
    try:
        copied = _copy(allocator.files, old, new)
    finally:
        with index.writing() as connection:
            there = find_visible(connection, [row.id for row in old])
            good = [(a, b) for a, b in zip(old, new, strict=True) if b.id in copied and a.id in there]
            release(connection, (row.id for row, _ in good))
            connection.executemany(
                "UPDATE records SET name = ?, owner = NULL WHERE id = ? AND owner = ?",
                [(before.name, after.id, after.owner) for before, after in good],
            )
            release(connection, {row.id for row in new} - {after.id for _, after in good})
            is_empty = allocator.drop_if_empty(connection, slab)
    return bool(copied) and not is_empty


def _copy(files: SlabFiles, old: list[Row], new: list[Row]) -> set[int]:
    """The ids of copies that are on the disk."""
    memory = [np.empty(row.num_bytes, dtype=np.uint8) for row in old]
    read = files.read([(row.slab, row.offset, record) for row, record in zip(old, memory, strict=True)])
    found = [(row, record) for row, record, done in zip(new, memory, read, strict=True) if done]
    written = files.write([(row.slab, row.offset, record) for row, record in found])
    done = [row for (row, _), is_done in zip(found, written, strict=True) if is_done]
    files.sync({row.slab for row in done})
    return {row.id for row in done}
