"""DirectoryStore: a store in a local directory, for one process or several.

    index.sqlite   which record lies where (`index`); beside it room to open it on a full disk (`opening`)
    slabs/         the bytes (`slab_files`, `room`), moved by `transfer`
    owners/        the processes that have it open (`owners`)

A record is written into a slot that the index holds for its writer, and becomes visible in one transaction. So a
process that is killed leaves either a whole record or one that is never seen, whose slot the next one takes back. A
slot is given to another record only in a transaction that forgets the first; a reader looks again afterwards whether
the record is still the same, and answers MISS if not.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from typing_extensions import Buffer

from quire.errors import StoreError
from quire.tiers.store import Answer, Entry, StoreKey
from quire.tiers.stores.directory.compaction import Compaction
from quire.tiers.stores.directory.index import (
    Busy,
    Facts,
    Row,
    facts_of,
    find_owners,
    find_rows,
    find_visible,
    insert_rows,
    reclaim,
    release,
    rows_where,
)
from quire.tiers.stores.directory.opening import TRY_AGAIN, keep_reserve, open_directory
from quire.tiers.stores.directory.room import slot_size
from quire.tiers.stores.directory.transfer import Place, Transfer, as_bytes
from quire.tiers.stores.gate import Gate

HIT, MISS, PENDING, RETRY = Answer.HIT, Answer.MISS, Answer.PENDING, Answer.RETRY
_LISTED_AT_ONCE = 2000
_Verb = TypeVar("_Verb", bound=Callable[..., list[Answer]])


@dataclass(slots=True)
class _Prepared:
    """A slot that is held for us, and whether the record is in it."""

    row: Row
    is_put: bool = False


def _answering(verb: _Verb) -> _Verb:
    """RETRY for each key where the store is closed or its index is busy."""

    @functools.wraps(verb)
    def answer(self: DirectoryStore, keys: Sequence[StoreKey], *more: object) -> list[Answer]:
        answers = [RETRY] * len(keys)
        with self._gate as is_open, suppress(Busy):
            if is_open and keys:
                answers = verb(self, keys, *more)
        self.statistics.add(retries=answers.count(RETRY))
        return answers

    return cast(_Verb, answer)


class DirectoryStore:
    """A store on a local disk. Several processes may have it open at once, and it outlives them.

    `direct` says whether the page cache is gone around. A child process must not use what was opened before it was
    forked. `statistics` counts what this process has done since it opened the store: `hits`, `misses`, `stored`,
    `evicted`, `retries` (answers, not calls), `lost` (records that the medium no longer held), `overtaken` (records
    whose place went to others while they were read), `reclaimed` (records that a writer which died had not completed),
    `read_bytes` and `written_bytes` of records.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: int | None,
        *,
        threads: int = 4,
        slab_bytes: int | None = None,
        direct: bool | None = None,
        busy_seconds: float = 2.0,
        counts_use: bool = True,
    ) -> None:
        """Open a directory, or make one.

        `capacity` is what all slabs may take, in bytes, for every process from now on; None keeps what it is, of a
        directory that exists. A slab takes `slab_bytes`, a 64th of the capacity unless given. `direct` None goes around
        the page cache where the filesystem can; True insists. An index that other processes keep busy for
        `busy_seconds` is a RETRY. Without `counts_use` reading is no use of a record. Power that fails may take
        records, or leave some that their digests refuse.

        Raises StoreError where the directory cannot be used or is not a store of this version.
        """
        self.path = Path(path)
        self._counts_use = counts_use
        self._gate = Gate()
        self._prepared: dict[StoreKey, _Prepared] = {}
        self.statistics, self._files, self._owners, self._uses, self._room, self._index = open_directory(
            self.path, capacity, slab_bytes, direct, busy_seconds
        )
        self.direct = self._files.direct
        self._transfer = Transfer(threads)

    # -- writing

    @_answering
    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """Announce records of so many bytes; room is made by forgetting what was not used for longest.

        What is there already counts as used, and what is new as used from now on: the first of all of them the latest.
        """
        answers = [RETRY] * len(keys)
        times = self._uses.now(len(keys))
        first = {key: at for at, key in reversed(list(enumerate(keys)))}  # of a key that is there twice
        left = [at for at in sorted(first.values()) if sizes[at] > 0]
        has_more_room = True
        with suppress(Busy):
            while has_more_room and left:
                with self._index.writing() as index:
                    found, made = self._reserve(index, [(at, keys[at].pack(), sizes[at], times[at]) for at in left])
                    has_more_room = self._room.has_dropped
                for at, answer in found.items():
                    answers[at] = answer
                for at, row in made.items():
                    answers[at] = MISS
                    self._prepared[keys[at]] = _Prepared(row)
                left = [at for at in left if answers[at] is RETRY]
        self._files.close_removed()
        if self._uses.are_due:
            self._flush_uses()
        if len(first) < len(keys):
            said = {key: answers[at] for key, at in first.items()}
            for at, key in enumerate(keys):
                if first[key] != at:
                    answers[at] = PENDING if said[key] is MISS else said[key]
        return answers

    def _reserve(
        self, index: sqlite3.Connection, wanted: list[tuple[int, bytes, int, int]]
    ) -> tuple[dict[int, Answer], dict[int, Row]]:
        """What to answer of records that are there, and rows for others as far as there is room, by position.

        Each wanted record is a position, a name, bytes and a time of use.
        """
        found = find_rows(index, [name for _, name, _, _ in wanted])
        if any(row.owner is not None and self._owners.is_dead(row.owner) for row in found.values()):
            self._room.reclaim_dead(index)
            found = find_rows(index, list(found))
        answers: dict[int, Answer] = {}
        used: dict[int, int] = {}
        by_slot: dict[int, list[tuple[int, bytes, int, int]]] = defaultdict(list)
        for each in wanted:
            at, name, size, used_at = each
            row = found.get(name)
            if row is None:
                by_slot[slot_size(size)].append(each)
            elif row.owner is None:
                answers[at] = HIT
                used[row.id] = used_at
            else:
                answers[at] = PENDING
        self._uses.note(list(used), list(used.values()))
        made: dict[int, Row] = {}
        for slot_bytes, some in by_slot.items():
            places = self._room.take(index, slot_bytes, len(some))
            rows = [
                Row(0, name, *place, slot_bytes, size, used_at, self._owners.name)
                for (_, name, size, used_at), place in zip(some, places, strict=False)
            ]
            made.update(zip([at for at, *_ in some], insert_rows(index, rows), strict=False))
        return answers, made

    @_answering
    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Write records that were prepared with MISS. MISS: it was not, or with another size."""
        answers = [MISS] * len(keys)
        writing: dict[int, tuple[int, _Prepared]] = {}  # by row, so that a key given twice is written once
        places: list[Place] = []
        file_of = functools.cache(self._files.open)
        for at, (key, record) in enumerate(zip(keys, records, strict=True)):
            prepared, memory = self._prepared.get(key), as_bytes(record)
            if prepared is None or len(memory) != prepared.row.num_bytes or prepared.row.id in writing:
                continue
            file = file_of(prepared.row.slab)
            if file is None:
                answers[at] = RETRY
                continue
            prepared.is_put = False
            writing[prepared.row.id] = at, prepared
            places.append((file, prepared.row.offset, memory))
        for (at, prepared), done in zip(writing.values(), self._transfer.write(places), strict=True):
            prepared.is_put = done
            answers[at] = HIT if done else RETRY
        self.statistics.add(written_bytes=sum(each.row.num_bytes for _, each in writing.values() if each.is_put))
        return answers

    @_answering
    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Make prepared records visible, or drop them. RETRY: it was not put, or the index could not be written."""
        answers = [MISS] * len(keys)
        good: dict[int, Row] = {}
        bad: list[Row] = []
        for at, (key, is_good) in enumerate(zip(keys, ok, strict=True)):
            prepared = self._prepared.pop(key, None)
            if prepared is None:
                continue
            if is_good and prepared.is_put:
                good[at] = prepared.row
            else:
                bad.append(prepared.row)
                answers[at] = RETRY if is_good else MISS
        visible = self._make_visible(list(good.values()), bad)
        for at, row in good.items():
            answers[at] = HIT if row.id in visible else RETRY
        self.statistics.add(stored=len(visible))
        return answers

    def _make_visible(self, good: list[Row], bad: list[Row]) -> set[int]:
        """Ids of the rows that are visible now; all others are dropped."""
        ids = {row.id for row in good}
        try:
            with self._index.writing() as index:
                done = index.executemany(
                    "UPDATE records SET owner = NULL WHERE id = ? AND owner = ?", [(row.id, row.owner) for row in good]
                ).rowcount
                release(index, [row.id for row in bad])
                return ids if done == len(ids) else find_visible(index, list(ids))  # less where a slab was deleted
        except Busy:
            self._index.left.update(ids, (row.id for row in bad))
            return set()

    # -- reading

    @_answering
    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """Which records could be read now."""
        names = [key.pack() for key in keys]
        with self._index.reading as index:
            owners = find_owners(index, names)
        return [HIT if (owner := owners.get(name, "")) is None else self._seen(owner) for name in names]

    def _seen(self, owner: str) -> Answer:
        """What to say of a record that is being written; without an owner there is none."""
        return MISS if not owner or self._owners.is_dead(owner) else PENDING

    @_answering
    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Read records into writable buffers of exactly their size. Of any other size: MISS."""
        names = [key.pack() for key in keys]
        with self._index.reading as index:
            rows = find_rows(index, names)
        answers = [MISS] * len(names)
        reading: list[tuple[int, Row]] = []
        places: list[Place] = []
        lost: list[Row] = []
        file_of = functools.cache(self._files.open)
        for at, (name, record) in enumerate(zip(names, records, strict=True)):
            row, memory = rows.get(name), as_bytes(record)
            if row is None or len(memory) != row.num_bytes:
                continue
            if row.owner is not None:
                answers[at] = self._seen(row.owner)
                continue
            file = file_of(row.slab)
            if file is None:
                lost.append(row)
                continue
            reading.append((at, row))
            places.append((file, row.offset, memory))
        moved = self._transfer.read(places)
        # A slot is overwritten only after its record's row went. So if the row is still there, the bytes were its own.
        with self._index.reading as index:
            there = find_visible(index, [row.id for _, row in reading])
        hits: list[Row] = []
        for (at, row), done in zip(reading, moved, strict=True):
            if row.id in there and done:
                answers[at] = HIT
                hits.append(row)
            elif row.id in there:
                lost.append(row)
        if self._counts_use:
            self._uses.note([row.id for row in hits], self._uses.now(len(hits)))
        self.statistics.add(
            hits=len(hits),
            misses=len(answers) - len(hits),
            overtaken=len(reading) - len(there),
            read_bytes=sum(row.num_bytes for row in hits),
        )
        if lost:
            self._forget_lost(lost)
        if self._uses.are_due:
            self._flush_uses()
        return answers

    def _forget_lost(self, rows: list[Row]) -> None:
        """Records that the medium does not hold in full, and slabs whose file is gone."""
        self.statistics.add(lost=len(rows))
        with suppress(Busy), self._index.writing() as index:  # else they are found missing again
            release(index, (row.id for row in rows))
            for slab, slot_bytes in {(row.slab, row.slot_bytes) for row in rows}:
                if self._files.size(slab) is None:
                    self._room.drop(index, slab, slot_bytes)

    def _flush_uses(self) -> None:
        with suppress(Busy), self._index.writing(wait=False) as index:  # else another time
            self._uses.flush(index)

    # -- the rest

    def remove(self, keys: Sequence[StoreKey]) -> int:
        """Forget records, and give slabs with nothing left in them back to the disk; returns how many records there
        were."""
        visible: list[Row] = []
        with self._gate as is_open, suppress(Busy):
            if is_open and keys:
                with self._index.writing() as index:
                    rows = find_rows(index, [key.pack() for key in keys]).values()
                    found = [row for row in rows if row.owner is None]
                    release(index, (row.id for row in found))
                    for slab in {row.slab for row in found}:
                        self._room.drop_if_empty(index, slab)
                visible = found
        return len(visible)

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """All visible records, or those of one scope, as they are when they are reached. Raises StoreError."""
        low, high = (b"", b"\xff" * 64) if scope is None else (scope, scope + b"\xff" * 64)
        condition = "id > ? AND owner IS NULL AND name >= ? AND name <= ? ORDER BY id LIMIT ?"
        after = 0
        while True:
            with self._entered("listed"), self._index.reading as index:
                rows = rows_where(index, condition, (after, low, high, _LISTED_AT_ONCE))
            now = time.time_ns() // 1000
            for row in rows:
                idle = max(0, now - self._uses.of(row.id, row.used)) / 1e6
                yield Entry(StoreKey.unpack(row.name), row.num_bytes, idle)
            if len(rows) < _LISTED_AT_ONCE:
                return
            after = rows[-1].id

    def facts(self) -> Facts:
        """What the directory is and holds now. Raises StoreError."""
        with self._entered("looked into"):
            return facts_of(self._index, self.path, direct=self.direct, num_owners=self._owners.count())

    def reclaim(self) -> int:
        """Drop what writers that died had prepared; returns how many records that were. Others do this when they need
        the room, or meet such a record. Raises StoreError."""
        with self._entered("changed"), self._index.writing() as index:
            return self._room.reclaim_dead(index)

    def compact(self) -> None:
        """Give the disk back what few records hold on to: they move together. Others may be at the store; what they
        look for while it moves may be a MISS for them. Raises StoreError."""
        with self._entered("changed"):
            self._flush_uses()
            Compaction(self._index, self._room, self._files, self._transfer, self._owners.name).run()

    @contextmanager
    def _entered(self, done: str) -> Iterator[None]:
        """Raises StoreError where the store is closed, or what is done in the block cannot be done now."""
        with self._gate as is_open:
            if not is_open:
                raise StoreError(f"the store '{self.path}' is closed.")
            try:
                yield
            except (Busy, OSError) as error:
                raise StoreError(f"the store '{self.path}' cannot be {done}: {error}.", fix=TRY_AGAIN) from error

    def close(self) -> None:
        """Wait for what is under way, drop what was prepared and not completed, and close all files. May be called
        twice."""
        if not self._gate.shut():
            return
        self._transfer.close()
        with suppress(Busy), self._index.writing() as index:  # else others see that we are gone when they need the room
            self._uses.flush(index)
            reclaim(index, self._owners.name)
        self._prepared.clear()
        self._index.close()
        self._files.close()
        self._owners.close()
        keep_reserve(self.path)
