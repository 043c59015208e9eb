"""DirectoryStore: a store in a local directory, for one process or several.

    index.sqlite   which record lies where (`index`); beside it room to open it on a full disk (`reserve`)
    slabs/         the bytes (`slab_files`, `room`), moved by `transfer`
    owners/        who has it open (`owners`)

A record is written into a slot that the index holds for its writer, and becomes visible in one transaction. So a
process that is killed leaves either a whole record or one that nobody sees, whose slot the next one takes back. A slot
is given to another record only in a transaction that forgets the first; whoever reads looks again afterwards whether
the record is still the same, and answers MISS if not.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from typing_extensions import Buffer

from quire.errors import StoreError
from quire.tiers.store import Answer, Entry, StoreKey
from quire.tiers.stores.directory.compaction import Compaction
from quire.tiers.stores.directory.facts import Facts, facts_of
from quire.tiers.stores.directory.index import NOBODY, Busy, Row, find_rows, insert_rows, release
from quire.tiers.stores.directory.opening import RESERVE, Opened, open_directory, reclaim_dead
from quire.tiers.stores.directory.reserve import keep_reserve
from quire.tiers.stores.directory.room import reclaim, slot_size
from quire.tiers.stores.directory.slab_files import OpenSlabs
from quire.tiers.stores.directory.statistics import Statistics
from quire.tiers.stores.directory.transfer import Place, Transfer, as_bytes
from quire.tiers.stores.directory.uses import Uses
from quire.tiers.stores.gate import Gate

HIT, MISS, PENDING, RETRY = Answer.HIT, Answer.MISS, Answer.PENDING, Answer.RETRY
_LISTED_AT_ONCE = 2000


@dataclass(slots=True)
class _Prepared:
    """A slot that is held for us, and whether the record is in it."""

    row: Row
    is_put: bool = False


class DirectoryStore:
    """A store on a local disk. Several processes may have it open at once, and it outlives them.

    `direct` says whether the page cache is gone around, `statistics` what this process has done. A child process must
    not use what was opened before it was forked.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: int | None,
        *,
        threads: int = 4,
        slab_bytes: int | None = None,
        direct: bool | None = None,
        durable: bool = False,
        busy_seconds: float = 2.0,
        counts_use: bool = True,
    ) -> None:
        """Open a directory, or make one.

        `capacity` is what all slabs may take, in bytes, for every process from now on; None keeps what it is, of a
        directory that exists. A slab takes `slab_bytes`, a 64th of the capacity unless given. `direct` None goes around
        the page cache where the filesystem can; True insists. `durable` waits for the disk before a record is visible;
        without it, power that fails may take records, or leave some that their digests refuse. An index that other
        processes keep busy for `busy_seconds` is a RETRY. Without `counts_use` reading is no use of a
        record.

        Raises StoreError where the directory cannot be used or is not a store of this version.
        """
        self.path = Path(path)
        self.statistics = Statistics()
        self._durable = durable
        self._counts_use = counts_use
        self._gate, self._lock = Gate(), Lock()
        self._prepared: dict[StoreKey, _Prepared] = {}
        self._left: set[int] = set()  # records of ours that are to be dropped, and could not be yet
        self._uses = Uses()
        opened: Opened = open_directory(
            self.path, capacity, slab_bytes=slab_bytes, direct=direct, durable=durable, busy_seconds=busy_seconds
        )
        self._files, self._owners, self._index, self._room = opened.files, opened.owners, opened.index, opened.room
        self.statistics.add(reclaimed=opened.reclaimed)
        self._transfer = Transfer(threads)

    @property
    def direct(self) -> bool:
        """Whether the page cache is gone around."""
        return self._files.direct

    # -- writing

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """Announce records of so many bytes; room is made by forgetting what was not used for longest.

        What is there already counts as used, and what is new as used from now on: the first of all of them the latest.
        """
        with self._gate.entered() as is_open:
            if not is_open or not keys:
                return self._retries(len(keys))
            answers = [RETRY] * len(keys)
            times = self._uses.now(len(keys))
            left = list(range(len(keys)))
            more_room = True
            while more_room and left:
                try:
                    more_room = self._reserve(keys, sizes, times, answers, left)
                except Busy:
                    break
                left = [at for at in left if answers[at] is RETRY]
            self._files.let_go()
            if self._uses.are_due:
                self._flush_uses()
        self.statistics.add(retries=answers.count(RETRY))
        return answers

    def _reserve(
        self,
        keys: Sequence[StoreKey],
        sizes: Sequence[int],
        times: Sequence[int],
        answers: list[Answer],
        positions: Sequence[int],
    ) -> bool:
        """One transaction; fills in the answers at these positions. True: those with RETRY may be tried again."""
        names = [keys[at].pack() for at in positions]
        with self._writing() as index:
            found, rows = self._reserve_in(
                index, names, [sizes[at] for at in positions], [times[at] for at in positions]
            )
            more_room = self._room.has_dropped
        with self._lock:
            for at, row in rows.items():
                self._prepared[keys[positions[at]]] = _Prepared(row)
        for at, answer in zip(positions, found, strict=True):
            answers[at] = answer
        return more_room

    def _reserve_in(
        self, index: sqlite3.Connection, names: list[bytes], sizes: list[int], times: list[int]
    ) -> tuple[list[Answer], dict[int, Row]]:
        """What to answer, and the rows that were made, by position."""
        found = find_rows(index, names)
        dead = {row.owner for row in found.values() if row.owner is not None and self._is_dead(row.owner)}
        for owner in dead:
            self.statistics.add(reclaimed=reclaim(index, str(owner)))
        there = {name: row.owner for name, row in found.items() if row.owner not in dead}
        answers = []
        wanted: dict[int, list[int]] = defaultdict(list)
        for at, (name, size) in enumerate(zip(names, sizes, strict=True)):
            if name in there:
                answers.append(HIT if there[name] is None else PENDING)
            elif size < 1:
                answers.append(RETRY)
            else:
                answers.append(MISS)
                there[name] = self._owners.name
                wanted[slot_size(size)].append(at)
        there_already = [at for at, answer in enumerate(answers) if answer is HIT]
        self._uses.note([found[names[at]].id for at in there_already], [times[at] for at in there_already])
        rows: dict[int, Row] = {}
        for slot_bytes, positions in wanted.items():
            places = self._take(index, slot_bytes, len(positions))
            made = [
                Row(0, names[at], slab, slot, slot_bytes, sizes[at], times[at], self._owners.name)
                for at, (slab, slot) in zip(positions, places, strict=False)
            ]
            rows.update(zip(positions, insert_rows(index, made), strict=False))
            refused = {names[at] for at in positions[len(places) :]}
            if refused:  # wherever they stand in the batch
                answers = [RETRY if name in refused else said for name, said in zip(names, answers, strict=True)]
        return answers, rows

    def _take(self, index: sqlite3.Connection, slot_bytes: int, count: int) -> list[tuple[int, int]]:
        before = self._room.evicted
        places = self._room.take(index, slot_bytes, count, self._uses.flush)
        if len(places) < count:
            reclaimed = reclaim_dead(index, self._owners)
            self.statistics.add(reclaimed=reclaimed)
            if reclaimed:
                places += self._room.take(index, slot_bytes, count - len(places), self._uses.flush)
        self.statistics.add(evicted=self._room.evicted - before)
        return places

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Write records that were prepared with MISS. MISS: it was not, or with another size."""
        answers = [MISS] * len(keys)
        with self._gate.entered() as is_open:
            if not is_open:
                return self._retries(len(keys))
            writing: dict[int, _Prepared] = {}  # by row, so that a key given twice is written once
            positions: list[int] = []
            places: list[Place] = []
            opened = OpenSlabs(self._files)
            for at, (key, record) in enumerate(zip(keys, records, strict=True)):
                prepared, memory = self._prepared.get(key), as_bytes(record)
                if prepared is None or len(memory) != prepared.row.num_bytes or prepared.row.id in writing:
                    continue
                file = opened[prepared.row.slab]
                if file is None:
                    answers[at] = RETRY
                    continue
                prepared.is_put = False
                writing[prepared.row.id] = prepared
                positions.append(at)
                places.append((file, prepared.row.offset, memory))
            moved = self._transfer.write(places)
        for at, prepared, done in zip(positions, writing.values(), moved, strict=True):
            prepared.is_put = done
            answers[at] = HIT if done else RETRY
        written = sum(prepared.row.num_bytes for prepared in writing.values() if prepared.is_put)
        self.statistics.add(written_bytes=written, retries=answers.count(RETRY))
        return answers

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Make prepared records visible, or drop them. RETRY: it was not put, or the index could not be written."""
        answers = [MISS] * len(keys)
        with self._gate.entered() as is_open:
            if not is_open or not keys:
                return self._retries(len(keys))
            good: dict[int, Row] = {}
            bad: list[Row] = []
            for at, (key, good_one) in enumerate(zip(keys, ok, strict=True)):
                with self._lock:
                    prepared = self._prepared.pop(key, None)
                if prepared is None:
                    continue
                if good_one and prepared.is_put:
                    good[at] = prepared.row
                    continue
                bad.append(prepared.row)
                answers[at] = RETRY if good_one else MISS
            visible = self._make_visible(list(good.values()), bad)
        for at, row in good.items():
            answers[at] = HIT if row.id in visible else RETRY
        self.statistics.add(stored=len(visible), retries=answers.count(RETRY))
        return answers

    def _make_visible(self, good: list[Row], bad: list[Row]) -> set[int]:
        """Ids of the rows that are visible now; all others are dropped."""
        try:
            if self._durable:
                self._files.sync({row.slab for row in good})
            with self._writing() as index:
                done = index.executemany(
                    "UPDATE records SET owner = NULL WHERE id = ? AND owner = ?", [(row.id, row.owner) for row in good]
                ).rowcount
                if bad:
                    release(index, (row.id for row in bad))
            ids = {row.id for row in good}
            return ids if done == len(ids) else self._index.still_there(list(ids))  # less where a slab was deleted
        except (Busy, OSError):
            with self._lock:
                self._left.update(row.id for row in (*good, *bad))
            return set()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, in which what could not be dropped before is dropped."""
        with self._lock:
            left = set(self._left)
        with self._index.writing(self._room.settle) as index:
            if left:
                release(index, left, owner=self._owners.name)
            yield index
        if left:
            with self._lock:
                self._left -= left

    # -- reading

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """Which records could be read now."""
        with self._gate.entered() as is_open:
            if not is_open or not keys:
                return self._retries(len(keys))
            names = [key.pack() for key in keys]
            try:
                owners = self._index.owners(names)
            except Busy:
                return self._retries(len(keys))
            return [HIT if owner is None else self._seen(owner) for owner in owners]

    def _seen(self, owner: str) -> Answer:
        """What to say of a record that is being written."""
        return MISS if owner == NOBODY or self._is_dead(owner) else PENDING

    def _is_dead(self, owner: str) -> bool:
        return owner != self._owners.name and self._owners.is_dead(owner)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Read records into writable buffers of exactly their size. Of any other size: MISS."""
        with self._gate.entered() as is_open:
            if not is_open or not keys:
                return self._retries(len(keys))
            names = [key.pack() for key in keys]
            try:
                rows = self._index.find(names)
                answers = self._read(names, rows, records)
            except Busy:
                return self._retries(len(keys))
            if self._uses.are_due:
                self._flush_uses()
        self.statistics.add(hits=answers.count(HIT), misses=len(answers) - answers.count(HIT))
        return answers

    def _read(self, names: list[bytes], rows: dict[bytes, Row], records: Sequence[Buffer]) -> list[Answer]:
        answers = [MISS] * len(names)
        reading: list[tuple[int, Row]] = []
        places: list[Place] = []
        lost: list[Row] = []
        opened = OpenSlabs(self._files)
        for at, (name, record) in enumerate(zip(names, records, strict=True)):
            row, memory = rows.get(name), as_bytes(record)
            if row is None or len(memory) != row.num_bytes:
                continue
            if row.owner is not None:
                answers[at] = self._seen(row.owner)
                continue
            file = opened[row.slab]
            if file is None:
                lost.append(row)
                continue
            reading.append((at, row))
            places.append((file, row.offset, memory))
        moved = self._transfer.read(places)
        # A slot is overwritten only after its record's row went. So if the row is still there, the bytes were its own.
        there = self._index.still_there([row.id for _, row in reading])
        for (at, row), done in zip(reading, moved, strict=True):
            if row.id in there and done:
                answers[at] = HIT
            elif row.id in there:
                lost.append(row)
        hits = [row for at, row in reading if answers[at] is HIT]
        if self._counts_use:
            self._uses.note([row.id for row in hits])
        self.statistics.add(read_bytes=sum(row.num_bytes for row in hits), overtaken=len(reading) - len(there))
        if lost:
            self._forget_lost(lost)
        return answers

    def _forget_lost(self, rows: list[Row]) -> None:
        """Records that the medium does not hold in full, and slabs whose file is gone."""
        self.statistics.add(lost=len(rows))
        with suppress(Busy), self._writing() as index:  # else they are found missing again
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
        with self._gate.entered() as is_open:
            if not is_open or not keys:
                return 0
            try:
                with self._writing() as index:
                    rows = find_rows(index, [key.pack() for key in keys])
                    visible = [row for row in rows.values() if row.owner is None]
                    release(index, (row.id for row in visible))
                    for slab in {row.slab for row in visible}:
                        self._room.drop_if_empty(index, slab)
            except Busy:
                return 0
            return len(visible)

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """All visible records, or those of one scope, as they are when they are reached. Raises StoreError."""
        after = 0
        while True:
            with self._gate.entered() as is_open:
                if not is_open:
                    raise StoreError(f"the store '{self.path}' is closed.")
                try:
                    rows = self._index.page(after, scope, _LISTED_AT_ONCE)
                except Busy as error:
                    raise StoreError(
                        f"the store '{self.path}' cannot be listed: {error}.",
                        fix="try again; if its index is damaged, remove the directory: a store can be filled again.",
                    ) from error
            now = time.time_ns() // 1000
            for row in rows:
                idle = max(0, now - self._uses.of(row.id, row.used)) / 1e6
                yield Entry(StoreKey.unpack(row.name), row.num_bytes, idle)
            if len(rows) < _LISTED_AT_ONCE:
                return
            after = rows[-1].id

    def facts(self) -> Facts:
        """What the directory is and holds now. Raises StoreError."""
        with self._gate.entered() as is_open:
            if not is_open:
                raise StoreError(f"the store '{self.path}' is closed.")
            return facts_of(self.path, self._files, self._owners, self._index)

    def reclaim(self) -> int:
        """Drop what writers that died had prepared; returns how many records that were. Others do this when they need
        the room, or meet such a record. Raises StoreError."""
        with self._gate.entered() as is_open:
            try:
                if not is_open:
                    raise Busy("it is closed")
                with self._index.writing() as index:
                    count = reclaim_dead(index, self._owners)
            except Busy as error:
                raise StoreError(f"the store '{self.path}' cannot be changed: {error}.") from error
        self.statistics.add(reclaimed=count)
        return count

    def compact(self) -> None:
        """Give the disk back what few records hold on to: they move together. Others may be at the store; what they
        look for while it moves may be a MISS for them. Raises StoreError."""
        with self._gate.entered() as is_open:
            try:
                if not is_open:
                    raise Busy("it is closed")
                self._flush_uses()
                Compaction(self._index, self._room, self._files, self._transfer, self._owners.name).run()
            except (Busy, OSError) as error:
                raise StoreError(f"the store '{self.path}' cannot be changed: {error}.") from error

    def close(self) -> None:
        """Wait for what is under way, drop what was prepared and not completed, and let go. May be called twice."""
        if not self._gate.shut():
            return
        self._transfer.close()
        with suppress(Busy), self._index.writing() as index:  # else whoever needs the room sees that we are gone
            self._uses.flush(index)
            reclaim(index, self._owners.name)
        self._prepared.clear()
        self._index.close()
        self._files.close()
        self._owners.close()
        keep_reserve(self.path / RESERVE)

    def _retries(self, count: int) -> list[Answer]:
        if count:
            self.statistics.add(retries=count)
        return [RETRY] * count
