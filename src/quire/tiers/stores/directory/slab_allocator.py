"""SlabAllocator: allocates slots for new records, creates slabs up to the capacity, evicts, and compacts.

A slab has slots of one size. If no slot of a size is free, its records get, in this order: a new slab while there is
capacity; a slab of another size that is colder than all of theirs; the slots of the least recently used of them; and
slots of unfinished records of dead writers. So a size that is no longer written loses its bytes to others.

Every method except `settle` runs inside a transaction of the index. `settle` removes files after it, so that a
transaction that is rolled back loses nothing.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import NamedTuple

from quire.owned_files import make_file
from quire.tiers.store import Counts
from quire.tiers.stores.directory.index import (
    Index,
    Owners,
    Row,
    empty_slab,
    find_visible,
    insert_rows,
    reclaim,
    release,
    rows_where,
)
from quire.tiers.stores.directory.slab_files import BLOCK, SlabFiles

Slot = tuple[int, int]  # slab, and the slot in it
_LOOK_EVERY = 16  # evicted records, at least, between two scans of all slabs
_LEFT_BYTES = 64 << 20  # left on the disk for other programs
_FLUSH_SECONDS = 5.0
_MOST_USES = 50_000
_MOVED_BYTES = 32 << 20  # bytes of records that one transaction of `compact` copies

_EMPTIED = """
SELECT id, slot_bytes, num_slots FROM (
    SELECT s.id, s.slot_bytes, s.num_slots, COUNT(r.id) AS num_records, COUNT(r.owner) AS num_written,
        SUM(s.num_slots - COUNT(r.id)) OVER (PARTITION BY s.slot_bytes) AS num_free
    FROM slabs s LEFT JOIN records r ON r.slab = s.id GROUP BY s.id
) WHERE num_written = 0 AND num_free >= num_slots ORDER BY 1.0 * num_records / num_slots
"""
"""Slabs without unfinished records, whose records fit into other slabs: the least full first. O(records)."""


def slot_size(num_bytes: int) -> int:
    """The slot for a record: whole blocks, above 32 blocks in steps of at most 1/32, so that there are few sizes."""
    blocks = -(-num_bytes // BLOCK)
    step = 1 << max(0, (blocks - 1).bit_length() - 6)
    return -(-blocks // step) * step * BLOCK


def largest_in(capacity: int) -> int:
    """Bytes of the largest record whose slot fits."""
    blocks = capacity // BLOCK
    return blocks // (step := 1 << max(0, (blocks - 1).bit_length() - 6)) * step * BLOCK


logger = logging.getLogger(__name__)


class AccessTimes:
    """Times of last uses by id, in microseconds, all distinct, in memory until a transaction is worthwhile."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._used: dict[int, int] = {}
        self._last = 0
        self._flushed_at = time.monotonic()

    def now(self, count: int) -> range:
        """Times for the records of a batch: the first is the latest."""
        with self._lock:
            start = max(self._last + 1, time.time_ns() // 1000)
            self._last = start + count - 1
            return range(start, start + count)[::-1]

    def note(self, ids: Sequence[int], times: Sequence[int]) -> None:
        """These records were used at these times. For a repeated id the first counts."""
        with self._lock:
            self._used.update(zip(reversed(ids), reversed(times), strict=True))

    def of(self, record: int, stored: int) -> int:
        """The last use of a record, as far as this process has it."""
        return max(stored, self._used.get(record, 0))

    @property
    def are_due(self) -> bool:
        """Whether it is time to `flush`, for other processes."""
        waited = time.monotonic() - self._flushed_at
        return bool(self._used) and (waited > _FLUSH_SECONDS or len(self._used) > _MOST_USES)

    def flush(self, index: sqlite3.Connection) -> None:
        """Write uses to the index, inside a transaction. A rollback loses only these."""
        with self._lock:
            used, self._used = self._used, {}
            self._flushed_at = time.monotonic()
        index.executemany(
            "UPDATE records SET used = ? WHERE id = ? AND owner IS NULL AND used < ?",
            [(at, number, at) for number, at in used.items()],
        )


class _Slab(NamedTuple):
    id: int
    slot_bytes: int
    num_bytes: int
    used: int


class SlabAllocator:
    """Allocates for one opened store. `dropped` are slabs whose bytes are free after the current transaction."""

    def __init__(self, files: SlabFiles, owners: Owners, slab_bytes: int | None) -> None:
        """`slab_bytes` None: a 64th of the capacity; for a small capacity up to an 8th, to have slabs of 1 MiB."""
        self.files = files
        self.owners = owners
        self.access_times = AccessTimes()
        self.statistics = Counts()
        self._slab_bytes = slab_bytes
        self._since_look: Counter[int] = Counter()
        self._made: list[int] = []
        self._is_told = False
        self.dropped: list[int] = []

    def alloc(self, index: sqlite3.Connection, slot_bytes: int, count: int) -> list[Slot]:
        """Up to `count` slots; fewer if all others are being written or the disk is full."""
        (capacity,) = index.execute("SELECT value FROM settings WHERE name = 'capacity'").fetchone()
        if slot_bytes > capacity:
            return []
        if self.drop_coldest(index, capacity):
            return []  # its capacity was lowered while others wrote: the next transaction goes on
        taken = self.alloc_unused(index, slot_bytes, count)
        while len(taken) < count and self._grow(index, slot_bytes, capacity):
            taken += self.alloc_unused(index, slot_bytes, count - len(taken))
        if len(taken) < count:
            self.access_times.flush(index)
        while len(taken) < count:
            slab = self._colder_slab(index, slot_bytes, capacity)
            if slab is None:
                evicted = self._evict(index, slot_bytes, count - len(taken))
                taken += evicted
                if not evicted and not self.reclaim_dead(index):
                    break
            elif slab.num_bytes >= slot_bytes:
                self._convert(index, slab, slot_bytes)
            else:
                self.drop(index, slab.id, slab.slot_bytes)
                if capacity - _sum(index) >= slot_bytes:
                    break  # the next transaction allocates it, when the file is removed
            taken += self.alloc_unused(index, slot_bytes, count - len(taken))
        return taken

    def settle(self, committed: bool) -> None:
        """After a transaction: remove the files of dropped slabs or, if it was rolled back, of new ones."""
        dropped, made = self.dropped, self._made
        self.dropped, self._made = [], []
        for slab in dropped if committed else made:
            self.files.drop(slab)

    def reclaim_dead(self, index: sqlite3.Connection) -> int:
        """Drop unfinished records of dead writers; returns their number."""
        names = index.execute("SELECT DISTINCT owner FROM records WHERE owner IS NOT NULL").fetchall()
        count = sum(reclaim(index, name) for (name,) in names if self.owners.is_dead(name))
        self.statistics.add(reclaimed=count)
        return count

    def drop_coldest(self, index: sqlite3.Connection, capacity: int, only: int | None = None) -> bool:
        """Drop the coldest slab, or `only` that one, while all of them exceed the capacity; returns whether it did."""
        slab = _coldest(index, only=only) if _sum(index) > capacity else None
        if slab is not None:
            self.drop(index, slab.id, slab.slot_bytes)
        return slab is not None

    def drop(self, index: sqlite3.Connection, slab: int, slot_bytes: int) -> None:
        """Remove a slab and all its records."""
        self.statistics.add(evicted=empty_slab(index, slab, slot_bytes))
        index.execute("DELETE FROM slabs WHERE id = ?", (slab,))
        self.dropped.append(slab)

    def drop_if_empty(self, index: sqlite3.Connection, slab: int) -> bool:
        """Remove a slab if it has no records; returns whether it was removed."""
        row = index.execute(
            "SELECT slot_bytes FROM slabs WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM records WHERE slab = ?1)", (slab,)
        ).fetchone()
        if row is not None:
            self.drop(index, slab, *row)
        return row is not None

    def alloc_unused(self, index: sqlite3.Connection, slot_bytes: int, count: int, excluded: int = -1) -> list[Slot]:
        """Up to `count` empty slots of slabs other than `excluded`, in order, so that a batch is adjacent."""
        free: list[Slot] = index.execute(
            "SELECT slab, slot FROM free WHERE slot_bytes = ? AND slab != ? ORDER BY slab, slot LIMIT ?",
            (slot_bytes, excluded, count),
        ).fetchall()
        index.executemany(
            "DELETE FROM free WHERE slot_bytes = ? AND slab = ? AND slot = ?", [(slot_bytes, *place) for place in free]
        )
        while len(free) < count:
            row = index.execute(
                "SELECT id, fresh, num_slots FROM slabs WHERE slot_bytes = ? AND id != ? AND fresh < num_slots LIMIT 1",
                (slot_bytes, excluded),
            ).fetchone()
            if row is None:
                break
            slab, fresh, num_slots = row
            end = min(num_slots, fresh + count - len(free))
            free += [(slab, slot) for slot in range(fresh, end)]
            index.execute("UPDATE slabs SET fresh = ? WHERE id = ?", (end, slab))
        return free

    def _grow(self, index: sqlite3.Connection, slot_bytes: int, capacity: int) -> bool:
        if self.dropped:
            return False  # their files still use space
        slab_bytes = self._slab_bytes or max(capacity // 64, min(capacity // 8, 1 << 20))
        num_slots = min(max(1, slab_bytes // slot_bytes), (capacity - _sum(index)) // slot_bytes)
        free, left = self.files.free_bytes, min(slab_bytes, _LEFT_BYTES)
        if free - left < num_slots * slot_bytes and not self._is_told:
            self._is_told = True
            logger.warning("the disk of a store is nearly full: of %d bytes, %d are left to others", free, left)
        num_slots = min(num_slots, (free - left) // slot_bytes)
        if num_slots < 1:
            return False
        num_bytes = num_slots * slot_bytes
        slab = secrets.randbits(48)  # a counter would repeat after a transaction is rolled back
        try:
            make_file(self.files.path(slab), num_bytes)
        except OSError:
            return False
        self._made.append(slab)
        index.execute("INSERT INTO slabs VALUES (?, ?, ?, ?, 0)", (slab, slot_bytes, num_slots, num_bytes))
        return True

    def _evict(self, index: sqlite3.Connection, slot_bytes: int, count: int) -> list[Slot]:
        """The slots of the least recently used records of this size."""
        rows = index.execute(
            "SELECT id, slab, slot FROM records WHERE slot_bytes = ? AND owner IS NULL ORDER BY used LIMIT ?",
            (slot_bytes, count),
        ).fetchall()
        index.executemany("DELETE FROM records WHERE id = ?", [(row[0],) for row in rows])
        self.statistics.add(evicted=len(rows))
        self._since_look[slot_bytes] += len(rows)
        return sorted((slab, slot) for _, slab, slot in rows)

    def _colder_slab(self, index: sqlite3.Connection, slot_bytes: int, capacity: int) -> _Slab | None:
        """A slab of another size whose records are all colder than those of this size."""
        (oldest, slots) = index.execute(
            "SELECT (SELECT MIN(used) FROM records WHERE slot_bytes = ?1 AND owner IS NULL),"
            " (SELECT MAX(num_slots) FROM slabs WHERE slot_bytes = ?1)",
            (slot_bytes,),
        ).fetchone()
        if oldest is not None and 0 < self._since_look[slot_bytes] < max(slots, _LOOK_EVERY):
            return None  # the scan is O(records): once per slab's worth of evictions
        coldest = _coldest(index, excluded=slot_bytes)
        if coldest is None or (oldest is not None and coldest.used >= oldest):
            self._since_look[slot_bytes] = 1
            return None
        self._since_look[slot_bytes] = 0
        (written,) = index.execute(
            "SELECT COALESCE(SUM(num_bytes), 0) FROM slabs WHERE id IN (SELECT slab FROM records WHERE owner NOT NULL)"
        ).fetchone()
        can_help = coldest.num_bytes >= slot_bytes or capacity - written >= slot_bytes
        return coldest if can_help else None

    def _convert(self, index: sqlite3.Connection, slab: _Slab, slot_bytes: int) -> None:
        """Reuse a slab for this size. Its file stays, so the disk cannot be full."""
        self.statistics.add(evicted=empty_slab(index, slab.id, slab.slot_bytes))
        index.execute(
            "UPDATE slabs SET slot_bytes = ?, num_slots = ?, fresh = 0 WHERE id = ?",
            (slot_bytes, slab.num_bytes // slot_bytes, slab.id),
        )


def _sum(index: sqlite3.Connection) -> int:
    (num_bytes,) = index.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM slabs").fetchone()
    return int(num_bytes)


def _by_use(index: sqlite3.Connection, excluded: int = 0, only: int | None = None) -> Iterator[_Slab]:
    """Slabs without writers whose slots do not have `excluded` bytes, the least recently used first. O(records)."""
    rows = index.execute(
        "SELECT s.id, s.slot_bytes, s.num_bytes, COALESCE(MAX(r.used), 0) AS used FROM slabs s"
        " LEFT JOIN records r ON r.slab = s.id WHERE s.slot_bytes != ?1 AND (?2 IS NULL OR s.id = ?2)"
        " GROUP BY s.id HAVING COUNT(r.owner) = 0 ORDER BY used",
        (excluded, only),
    )
    return map(_Slab._make, rows)


def _coldest(index: sqlite3.Connection, excluded: int = 0, only: int | None = None) -> _Slab | None:
    return next(_by_use(index, excluded, only), None)


def shrink(index: Index, allocator: SlabAllocator, capacity: int) -> None:
    """Drop the coldest slabs until the rest fits, one in each transaction, so that others go on. Raises Busy."""
    with index.reading() as connection:
        slabs = list(_by_use(connection)) if _sum(connection) > capacity else []
    for slab in slabs:
        with index.writing() as connection:
            allocator.drop_coldest(connection, capacity, only=slab.id)


def compact(index: Index, allocator: SlabAllocator) -> None:
    """Move records from nearly empty slabs into slots of others, until no slab's records fit into others, and remove
    the files. Each slab is tried once. Raises Busy if the index cannot be written.

        1  reserve slots in other slabs for invisible copies      a transaction
        2  copy the bytes, and flush them to the disk
        3  each row that still exists gives its name to its copy  a transaction

    If a process dies in between, it leaves unfinished records, as a writer does. A reader of an old place finds its row
    deleted and answers MISS.
    """
    tried: set[int] = set()
    while True:
        with index.reading() as connection:
            slabs = [slab for slab in connection.execute(_EMPTIED) if slab[0] not in tried]
        if not slabs:
            return
        slab, slot_bytes, num_slots = slabs[0]
        tried.add(slab)
        most = max(1, _MOVED_BYTES // slot_bytes)
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
    memory = [memoryview(bytearray(row.num_bytes)) for row in old]
    read = files.read([(row.slab, row.offset, [record]) for row, record in zip(old, memory, strict=True)])
    found = [(row, record) for row, record, done in zip(new, memory, read, strict=True) if done]
    written = files.write([(row.slab, row.offset, [record]) for row, record in found])
    done = [row for (row, _), is_done in zip(found, written, strict=True) if is_done]
    files.sync({row.slab for row in done})
    return {row.id for row in done}
