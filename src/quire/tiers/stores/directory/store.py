"""DirectoryStore: a store in a local directory, for one process or several.

    index.sqlite   the place of each record (`index`), and a reserve to open it on a full disk
    slabs/         the bytes (`slab_files`, `slab_allocator`)
    owners/        the processes that have the directory open (`index`)

The index reserves a slot for a writer. The record in it becomes visible in one transaction. So a process that is killed
leaves a whole record or an invisible one, whose slot another process reclaims. A slot is reused only in a transaction
that removes its record. After reading, a reader checks the row again, and answers MISS if it is gone.

Opening an index needs disk space for a log, even to read it. So a store keeps a reserve, a file as large as some logs.
It is removed if the disk is full, and created again when there is space.
"""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import compress
from pathlib import Path
from typing import TypeVar, cast

from quire.errors import InvalidInput, StoreError
from quire.owned_files import check_file, check_folder, make_file, open_owned
from quire.tiers.store import Answer, Calls, Entry, Record, RecordViews, Store, StoreKey, prepare_once
from quire.tiers.stores.directory.index import (
    FACTS,
    TRY_AGAIN,
    Busy,
    Facts,
    Index,
    Owners,
    Row,
    find_owners,
    find_rows,
    find_visible,
    insert_rows,
    reclaim,
    release,
    rows_where,
)
from quire.tiers.stores.directory.slab_allocator import SlabAllocator, compact, largest_in, shrink, slot_size
from quire.tiers.stores.directory.slab_files import BLOCK, Place, SlabFiles, is_aligned

logger = logging.getLogger(__name__)

_INDEX = "index.sqlite"
_RESERVE = f"{_INDEX}-reserve"
_RESERVE_BYTES = 1 << 20
_OURS = {_INDEX, _RESERVE, f"{_INDEX}-wal", f"{_INDEX}-shm", f"{_INDEX}-journal", "slabs", "owners", "lost+found"}


def open_directory(
    path: Path, capacity: int | None, slab_bytes: int | None, *, direct: bool | None, threads: int, busy_seconds: float
) -> tuple[Index, SlabAllocator]:
    """Open or create it; see `DirectoryStore`. A full disk: read only, with a warning. Raises StoreError, or
    InvalidInput for sizes below 1."""
    if any(size is not None and size < 1 for size in (capacity, slab_bytes)):
        raise InvalidInput(
            f"a store of {capacity} bytes in slabs of {slab_bytes} holds nothing.", fix="give sizes above zero."
        )

    def open_it(*, is_full: bool) -> tuple[Index, SlabAllocator]:
        """With `is_full`, an index that cannot be written stays as it is."""
        with ExitStack() as undo:
            try:
                _check_kind(path, may_be_new=capacity is not None)
                check_folder(path.resolve())
                _make_private(path / _INDEX)
                files = SlabFiles(path / "slabs", direct=direct, threads=threads)
                undo.callback(files.close)
                owners = Owners(path / "owners")
                undo.callback(owners.close)
            except OSError as error:
                raise StoreError(
                    f"the store '{path}' cannot be used: {error}.",
                    fix="give a directory that only this user may write to.",
                ) from error
            allocator = SlabAllocator(files, owners, slab_bytes)
            index = Index(path / _INDEX, busy_seconds=busy_seconds, ended=allocator.settle)
            undo.callback(index.close)
            try:
                with index.writing() as connection:
                    _repair(connection, path, allocator, capacity)
                if capacity is not None:
                    shrink(index, allocator, capacity)
                owners.remove_dead()
            except (Busy, OSError) as error:
                if not is_full:
                    raise StoreError(f"the store '{path}' cannot be used: {error}.", fix=TRY_AGAIN) from error
            undo.pop_all()
        return index, allocator

    try:
        opened = open_it(is_full=False)
    except StoreError:
        if not holds_store(path) or not _is_full(path):
            raise
        (path / _RESERVE).unlink(missing_ok=True)
        try:
            opened = open_it(is_full=True)
        except StoreError as error:
            raise StoreError(
                f"the disk of '{path}' is full, and the store cannot be opened: {error.message}",
                fix="make room for some MiB on it; what is stored is not lost.",
            ) from error
    if not keep_reserve(path):
        logger.warning("the disk of '%s' is full: what is stored is read, and no more stored than has room", path)
    return opened


def holds_store(path: Path) -> bool:
    """Whether a directory is a store."""
    return (path / _INDEX).exists()


def keep_reserve(path: Path) -> bool:
    """Create the reserve if it is missing; returns whether it exists."""
    return _is_made(path / _RESERVE) or (path / _RESERVE).exists()


def _is_full(folder: Path) -> bool:
    """Whether a file of a reserve's size cannot be written, also because of a quota."""
    probe = folder / f"{_INDEX}-probe-{os.urandom(8).hex()}"
    is_made = _is_made(probe)
    probe.unlink(missing_ok=True)
    return not is_made


def _is_made(file: Path) -> bool:
    try:
        make_file(file, _RESERVE_BYTES)
    except OSError:
        return False
    return True


def _check_kind(path: Path, *, may_be_new: bool) -> None:
    if holds_store(path):
        return
    is_folder, is_other = path.is_dir(), path.exists() and not path.is_dir()
    found = sorted(entry.name for entry in path.iterdir()) if is_folder else []
    if not may_be_new:
        empty = "it is empty" if is_folder else "nothing is there"
        what = "it is not a directory" if is_other else f"it holds '{found[0]}' and no index" if found else empty
        raise StoreError(
            f"there is no store in '{path}': {what}.",
            fix="give a directory that was served with --storage; a new one needs --storage-size (a tier: store_size).",
        )
    if is_other:
        raise StoreError(f"the store '{path}' cannot be used: it is not a directory.", fix="give a directory.")
    foreign = [name for name in found if name not in _OURS]
    if foreign:
        raise StoreError(
            f"'{path}' is not empty and is no store: it holds '{foreign[0]}'.", fix="give an empty directory."
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _lead_of(record: RecordViews) -> int:
    """The bytes before the first large piece, if they are few and it can be written from where it is."""
    lead = 0
    for view in record.views:
        if view.nbytes >= BLOCK:
            return lead if lead <= BLOCK and is_aligned(view) else 0
        lead += view.nbytes
    return 0


def _in_file(record: RecordViews, lead: int) -> Sequence[memoryview]:
    """The pieces of a record in the order of the file: the first `lead` bytes after all others."""
    parts, at = record.views, 0
    if not lead:
        return parts
    if lead == parts[0].nbytes:
        return (*parts[1:], parts[0])
    first, rest = list[memoryview](), list[memoryview]()
    for part in parts:
        cut = max(0, lead - at)
        first.append(part[:cut])
        rest.append(part[cut:])
        at += part.nbytes
    return [part for part in (*rest, *first) if part.nbytes]


def _make_private(path: Path) -> None:
    """Create the index with a private mode, which SQLite gives its other files. Warn if an older index has none."""
    with suppress(FileExistsError):
        os.close(open_owned(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    for name in _OURS - {"slabs", "owners", "lost+found"}:
        check_file(path.with_name(name))  # SQLite follows links
    if path.stat().st_mode & 0o077:
        logger.warning(
            "others on this machine may read the store '%s'; `chmod -R go= %s` ends that", *[path.parent] * 2
        )


def _repair(connection: sqlite3.Connection, path: Path, allocator: SlabAllocator, capacity: int | None) -> None:
    """Drop unfinished records of dead writers and damaged ones."""
    before = connection.execute("SELECT value FROM settings WHERE name = 'capacity'").fetchone()
    if capacity is not None and before != (capacity,):
        connection.execute("INSERT OR REPLACE INTO settings VALUES ('capacity', ?)", (capacity,))
    if capacity is None and before is None:
        raise StoreError(f"the store in '{path}' was never given a capacity.", fix="give one (--storage-size).")
    allocator.reclaim_dead(connection)
    files = allocator.files
    slabs = connection.execute("SELECT id, slot_bytes, num_bytes FROM slabs").fetchall()
    for slab, slot_bytes, num_bytes in slabs:
        size = files.size(slab)
        if size is None:
            allocator.drop(connection, slab, slot_bytes)
        elif size < num_bytes:
            lost = rows_where(
                connection, "slab = ? AND slot * slot_bytes + num_bytes > ? AND owner IS NULL", (slab, size)
            )
            release(connection, (row.id for row in lost))
    for slab in files.numbers() - {slab for slab, *_ in slabs}:
        files.drop(slab)  # from a transaction that never ended
    # Uses of a clock that was ahead would make each new record the next that is evicted.
    now = time.time_ns() // 1000
    connection.execute(
        "UPDATE records SET used = ?1"
        " WHERE used > ?1 AND owner IS NULL AND slot_bytes IN (SELECT slot_bytes FROM slabs)",
        (now,),
    )


HIT, MISS, PENDING, RETRY = Answer.HIT, Answer.MISS, Answer.PENDING, Answer.RETRY
_LISTED_AT_ONCE = 2000
_Verb = TypeVar("_Verb", bound=Callable[..., list[Answer]])


def _answering(verb: _Verb) -> _Verb:
    """The answer is RETRY for every key if the store is closed, its index is busy, or files cannot be opened now."""

    @functools.wraps(verb)
    def answer(self: DirectoryStore, keys: Sequence[StoreKey], *more: object) -> list[Answer]:
        answers = [RETRY] * len(keys)
        with self._calls as is_open, suppress(Busy, OSError):
            if is_open and keys:
                answers = verb(self, keys, *more)
        self.statistics.add(retries=answers.count(RETRY))
        return answers

    return cast(_Verb, answer)


class DirectoryStore(Store):
    """A store on a local disk, for several processes at once. A forked child must not use an opened store.

    `direct` says whether I/O bypasses the page cache. `statistics` counts what this process has done: `hits`, `misses`,
    `stored`, `evicted`, `retries` (answers, not calls), `lost` (records missing on the medium), `overtaken` (records
    evicted while they were read), `reclaimed` (unfinished records of dead writers), `read_bytes` and `written_bytes`.
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
        """Open a directory, or create one. Raises StoreError if it cannot be used or is not a store of this version.

        `capacity` bounds all slabs, in bytes, for every process from now on; None leaves that of an existing directory.
        A slab has `slab_bytes`, by default a 64th of the capacity. `direct` None bypasses the page cache if the
        filesystem supports it; True requires it. If other processes keep the index busy for `busy_seconds`, the answer
        is RETRY. Without `counts_use` reading is not a use. A power failure may lose or damage records.
        """
        self.path = Path(path)
        self._counts_use = counts_use
        self._calls = Calls()
        self._prepared: dict[StoreKey, Row] = {}
        self._written: set[int] = set()  # ids of prepared rows
        self._index, self._allocator = open_directory(
            self.path, capacity, slab_bytes, direct=direct, threads=threads, busy_seconds=busy_seconds
        )
        self.statistics, self._uses = self._allocator.statistics, self._allocator.access_times
        self._files, self._owners = self._allocator.files, self._allocator.owners
        self.direct = self._files.direct

    @_answering
    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        return prepare_once(keys, sizes, self._prepare)

    def _prepare(self, keys: list[StoreKey], sizes: list[int]) -> list[Answer]:
        names = [key.pack() for key in keys]
        with_room = zip(names, sizes, self._uses.now(len(keys)), strict=True)
        wanted = {name: (size, used) for name, size, used in with_room if size > 0}
        answers: dict[bytes, Answer] = {}
        has_more_room = True
        with suppress(Busy):
            while has_more_room and wanted:
                with self._index.writing() as index:
                    found, rows = self._reserve(index, wanted)
                    has_more_room = bool(self._allocator.dropped)
                self._prepared.update((StoreKey.unpack(row.name), row) for row in rows)
                answers |= found | dict.fromkeys((row.name for row in rows), MISS)
                wanted = {name: each for name, each in wanted.items() if name not in answers}
        self._files.close_removed()
        if self._uses.are_due:
            self._flush_uses()
        return [answers.get(name, RETRY) for name in names]

    def _reserve(
        self, index: sqlite3.Connection, wanted: dict[bytes, tuple[int, int]]
    ) -> tuple[dict[bytes, Answer], list[Row]]:
        """Answers for existing records, and rows for others while there is room. `wanted`: bytes and time by name."""
        found = find_rows(index, list(wanted))
        if any(row.owner is not None and self._owners.is_dead(row.owner) for row in found.values()):
            self._allocator.reclaim_dead(index)
            found = find_rows(index, list(found))
        visible = [row for row in found.values() if row.owner is None]
        self._uses.note([row.id for row in visible], [wanted[row.name][1] for row in visible])
        by_slot: dict[int, list[bytes]] = defaultdict(list)
        for name, (size, _) in wanted.items():
            if name not in found:
                by_slot[slot_size(size)].append(name)
        made: list[Row] = []
        for slot_bytes, names in by_slot.items():
            slots = zip(names, self._allocator.alloc(index, slot_bytes, len(names)), strict=False)
            new = [Row(0, name, *slot, slot_bytes, *wanted[name], self._owners.name) for name, slot in slots]
            made += insert_rows(index, new)
        return {row.name: HIT if row.owner is None else PENDING for row in found.values()}, made

    @_answering
    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        answers = [MISS] * len(keys)
        writing: dict[int, int] = {}  # keys: ids of rows, so that a repeated key is written once
        places: list[Place] = []
        for at, (key, record) in enumerate(zip(keys, map(RecordViews, records), strict=True)):
            row = self._prepared.get(key)
            if row is not None and row.id not in writing and record.num_bytes == row.num_bytes:
                writing[row.id] = at
                self._prepared[key] = row = row._replace(lead=_lead_of(record))
                places.append((row.slab, row.offset, _in_file(record, row.lead)))
        self._written.difference_update(writing)
        written = self._files.write(places)
        self._written.update(compress(writing, written))
        for at, done in zip(writing.values(), written, strict=True):
            answers[at] = HIT if done else RETRY
        self.statistics.add(written_bytes=sum(len(part) for *_, parts in compress(places, written) for part in parts))
        return answers

    @_answering
    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        answers = [MISS] * len(keys)
        good: dict[int, Row] = {}
        bad: list[Row] = []
        for at, (key, is_good) in enumerate(zip(keys, ok, strict=True)):
            row = self._prepared.pop(key, None)
            if row is None:
                continue
            if is_good and row.id in self._written:
                good[at] = row
            else:
                bad.append(row)
                answers[at] = RETRY if is_good else MISS
            self._written.discard(row.id)
        visible = self._make_visible(list(good.values()), bad)
        for at, row in good.items():
            answers[at] = HIT if row.id in visible else RETRY
        self.statistics.add(stored=len(visible))
        return answers

    def _make_visible(self, good: list[Row], bad: list[Row]) -> set[int]:
        """Ids of the rows that are visible now; the others are dropped."""
        ids = {row.id for row in good}
        try:
            with self._index.writing() as index:
                done = index.executemany(
                    "UPDATE records SET owner = NULL, lead = ? WHERE id = ? AND owner = ?",
                    [(row.lead, row.id, row.owner) for row in good],
                ).rowcount
                release(index, [row.id for row in bad])
                return ids if done == len(ids) else find_visible(index, list(ids))  # less if a slab was deleted
        except Busy:
            self._index.to_drop.update(ids, (row.id for row in bad))
            return set()

    @_answering
    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        names = [key.pack() for key in keys]
        with self._index.reading() as index:
            owners = find_owners(index, names)
        return [HIT if (owner := owners.get(name, "")) is None else self._seen(owner) for name in names]

    def _seen(self, owner: str) -> Answer:
        """The answer for a record that is being written; without an owner there is none."""
        return MISS if not owner or self._owners.is_dead(owner) else PENDING

    @_answering
    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        names = [key.pack() for key in keys]
        with self._index.reading() as index:
            rows = find_rows(index, names)
        answers = [MISS] * len(names)
        reading: list[tuple[int, Row]] = []
        places: list[Place] = []
        for at, (name, record) in enumerate(zip(names, map(RecordViews, records), strict=True)):
            row = rows.get(name)
            if row is None or record.num_bytes != row.num_bytes:
                continue
            if row.owner is not None:
                answers[at] = self._seen(row.owner)
                continue
            reading.append((at, row))
            places.append((row.slab, row.offset, _in_file(record, row.lead)))
        moved = self._files.read(places)
        # A slot is overwritten only after its record's row is deleted. So if the row is there, the bytes are its own.
        with self._index.reading() as index:
            there = find_visible(index, [row.id for _, row in reading])
        hits: list[Row] = []
        lost: list[Row] = []
        for (at, row), done in zip(reading, moved, strict=True):
            if row.id in there:
                answers[at] = HIT if done else MISS
                (hits if done else lost).append(row)
        if self._counts_use:
            self._uses.note([row.id for row in hits], self._uses.now(len(hits)))
        self.statistics.add(
            hits=len(hits),
            misses=len(answers) - len(hits),
            overtaken=len(reading) - len(there),
            read_bytes=sum(row.num_bytes for row in hits),
        )
        if lost:
            self._drop_lost(lost)
        if self._uses.are_due:
            self._flush_uses()
        return answers

    def _drop_lost(self, rows: list[Row]) -> None:
        """Remove records that are missing on the medium, and slabs without a file."""
        self.statistics.add(lost=len(rows))
        with suppress(Busy, OSError), self._index.writing() as index:  # else the next reader finds them missing again
            release(index, (row.id for row in rows))
            for slab, slot_bytes in {(row.slab, row.slot_bytes) for row in rows}:
                if self._files.size(slab) is None:
                    self._allocator.drop(index, slab, slot_bytes)

    def _flush_uses(self) -> None:
        with suppress(Busy), self._index.writing(wait=False) as index:  # else another time
            self._uses.flush(index)

    def remove(self, keys: Sequence[StoreKey]) -> int:
        visible: list[Row] = []
        with self._calls as is_open, suppress(Busy):
            if is_open and keys:
                with self._index.writing() as index:
                    rows = find_rows(index, [key.pack() for key in keys]).values()
                    found = [row for row in rows if row.owner is None]
                    release(index, (row.id for row in found))
                    for slab in {row.slab for row in found}:
                        self._allocator.drop_if_empty(index, slab)
                visible = found
        return len(visible)

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        low, high = (b"", b"\xff" * 64) if scope is None else (scope, scope + b"\xff" * 64)
        condition = "id > ? AND owner IS NULL AND name >= ? AND name <= ? ORDER BY id LIMIT ?"
        after = 0
        while True:
            with self._entered("listed"), self._index.reading() as index:
                rows = rows_where(index, condition, (after, low, high, _LISTED_AT_ONCE))
            now = time.time_ns() // 1000
            for row in rows:
                idle = max(0, now - self._uses.of(row.id, row.used)) / 1e6
                yield Entry(StoreKey.unpack(row.name), row.num_bytes, idle)
            if len(rows) < _LISTED_AT_ONCE:
                return
            after = rows[-1].id

    def facts(self) -> Facts:
        """The state of the directory now. Raises StoreError."""
        with self._entered("looked into"):
            with self._index.reading() as index:
                capacity, slab_bytes, taken, num_slabs, num_prepared = index.execute(FACTS).fetchone()
            disk = os.statvfs(self.path)
            return Facts(
                path=str(self.path),
                direct=self.direct,
                capacity=capacity,
                slab_bytes=slab_bytes,
                free_bytes=capacity - taken,
                index_bytes=sum(file.stat().st_size for file in self.path.glob("index.sqlite*")),
                disk_free_bytes=disk.f_bavail * disk.f_frsize,
                num_slabs=num_slabs,
                num_prepared=num_prepared,
                num_owners=self._owners.count(),
            )

    @property
    def largest_record(self) -> int:
        """A slab of one slot may be as large as all slabs. Raises StoreError."""
        return largest_in(self.facts().capacity)

    def reclaim(self) -> int:
        """Drop the unfinished records of dead writers; returns their number. Raises StoreError."""
        with self._entered("changed"), self._index.writing() as index:
            return self._allocator.reclaim_dead(index)

    def compact(self) -> None:
        """Move records together, and free nearly empty slabs. A record that moves may be a MISS. Raises StoreError."""
        with self._entered("changed"):
            self._flush_uses()
            compact(self._index, self._allocator)

    @contextmanager
    def _entered(self, done: str) -> Iterator[None]:
        """Raises StoreError if the store is closed, or the block fails."""
        with self._calls as is_open:
            if not is_open:
                raise StoreError(f"the store '{self.path}' is closed.")
            try:
                yield
            except (Busy, OSError) as error:
                raise StoreError(f"the store '{self.path}' cannot be {done}: {error}.", fix=TRY_AGAIN) from error

    def close(self) -> None:
        if not self._calls.close():
            return
        with suppress(Busy), self._index.writing() as index:  # else others reclaim these records
            self._uses.flush(index)
            reclaim(index, self._owners.name)
        self._prepared.clear()
        self._index.close()
        self._files.close()
        self._owners.close()
        keep_reserve(self.path)
