"""Index: which record lies where, in SQLite, shared by all processes that have the directory open.

    slabs    files of equal slots; `fresh` is the first slot that was never handed out
    free     slots that were given back
    records  what lies in a slot. With an owner: being written, seen by nobody. `id` is never used again, so a record
             whose id is still there after its bytes were read has not been overwritten meanwhile

Law: a slot of a slab is below `fresh` and in exactly one of `free` and `records`, or at or above it and in neither.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from quire.errors import StoreError

Value = TypeVar("Value", int, bytes)

VERSION = 1
LOG_BYTES = 8 << 20
"""What the index's log shrinks to once nobody reads what is older. While somebody does it grows; our own reads end at
once, and it is written back at every 4 MiB."""
NOBODY = ""
"""The owner of a record that is not there."""

_APPLICATION = 0x51555231  # "QUR1"
_BATCH = 256
_SCHEMA = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE slabs (
    id INTEGER PRIMARY KEY, slot_bytes INTEGER NOT NULL, num_slots INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    fresh INTEGER NOT NULL
);
CREATE TABLE free (
    slot_bytes INTEGER NOT NULL, slab INTEGER NOT NULL, slot INTEGER NOT NULL, PRIMARY KEY (slot_bytes, slab, slot)
) WITHOUT ROWID;
CREATE TABLE records (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name BLOB NOT NULL UNIQUE, slab INTEGER NOT NULL, slot INTEGER NOT NULL,
    slot_bytes INTEGER NOT NULL, num_bytes INTEGER NOT NULL, used INTEGER NOT NULL, owner TEXT, UNIQUE (slab, slot)
);
CREATE INDEX by_use ON records (slot_bytes, used) WHERE owner IS NULL;
CREATE INDEX by_owner ON records (owner) WHERE owner IS NOT NULL;
"""


class Row(NamedTuple):
    """A record's place. `used` is in microseconds of the wall clock; `owner` is None for what is visible."""

    id: int
    name: bytes
    slab: int
    slot: int
    slot_bytes: int
    num_bytes: int
    used: int
    owner: str | None

    @property
    def offset(self) -> int:
        """Where in the slab's file the record begins."""
        return self.slot * self.slot_bytes


_COLUMNS = ", ".join(Row._fields)


class Busy(Exception):
    """The index cannot be read or written now: another process is at it, the disk is full, the file is damaged."""


class Index:
    """Two connections: readers never wait for a writer. Methods may be called from any thread."""

    def __init__(self, path: Path, *, busy_seconds: float, durable: bool) -> None:
        """Opens or makes the file. Raises StoreError where it is of another version or no index."""
        self._reads, self._writes = Lock(), Lock()
        self._busy_ms = int(busy_seconds * 1000)
        try:
            self._writer = _connect(path, busy_seconds, durable=durable)
            self._reader = _connect(path, busy_seconds, durable=durable)
        except sqlite3.Error as error:
            raise StoreError(
                f"the index '{path}' cannot be opened: {error}.",
                fix="remove the directory if it is no store of yours, or is damaged; a store can be filled again.",
            ) from error

    @contextmanager
    def writing(
        self, settle: Callable[[bool], None] | None = None, *, wait: bool = True
    ) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process writes beside, then `settle(committed)`.

        Raises Busy, having changed nothing; with `wait` False without waiting for others.
        """
        if not self._writes.acquire(blocking=wait):
            raise Busy("another thread is writing")
        try:
            if not wait:
                self._writer.execute("PRAGMA busy_timeout = 0")
            self._writer.execute("BEGIN IMMEDIATE")
            committed = False
            try:
                yield self._writer
                self._writer.execute("COMMIT")
                committed = True
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                if settle is not None:
                    settle(committed)
        except sqlite3.Error as error:
            raise Busy(str(error)) from error
        finally:
            if not wait:
                with suppress(sqlite3.Error):
                    self._writer.execute(f"PRAGMA busy_timeout = {self._busy_ms}")
            self._writes.release()

    def find(self, names: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows that there are, of visible records and others. Raises Busy."""
        with self._reads:
            try:
                return find_rows(self._reader, names)
            except sqlite3.Error as error:
                raise Busy(str(error)) from error

    def owners(self, names: Sequence[bytes]) -> list[str | None]:
        """Who owns each record; None for what is visible, and NOBODY for what is not there. Raises Busy."""
        found: dict[bytes, str | None] = {}
        with self._reads:
            try:
                for some in _batches(names):
                    marks = ", ".join("?" * len(some))
                    found.update(self._reader.execute(f"SELECT name, owner FROM records WHERE name IN ({marks})", some))
            except sqlite3.Error as error:
                raise Busy(str(error)) from error
        return [found.get(name, NOBODY) for name in names]

    def still_there(self, ids: Sequence[int]) -> set[int]:
        """Which of these records are visible, and lie where they lay. Raises Busy."""
        with self._reads:
            try:
                found: set[int] = set()
                for some in _batches(ids):
                    marks = ", ".join("?" * len(some))
                    rows = self._reader.execute(
                        f"SELECT id FROM records WHERE id IN ({marks}) AND owner IS NULL", some
                    ).fetchall()
                    found.update(number for (number,) in rows)
                return found
            except sqlite3.Error as error:
                raise Busy(str(error)) from error

    def page(self, after: int, scope: bytes | None, count: int) -> list[Row]:
        """Up to `count` visible records with larger ids than `after`, of one scope or all. Raises Busy."""
        low, high = (b"", b"\xff" * 64) if scope is None else (scope, scope + b"\xff" * 64)
        with self._reads:
            try:
                rows = self._reader.execute(
                    f"SELECT {_COLUMNS} FROM records WHERE id > ? AND owner IS NULL AND name >= ? AND name <= ?"
                    " ORDER BY id LIMIT ?",
                    (after, low, high, count),
                ).fetchall()
            except sqlite3.Error as error:
                raise Busy(str(error)) from error
        return [Row(*row) for row in rows]

    def one(self, query: str) -> tuple[int, ...]:
        """The only row of a query that has one. Raises Busy."""
        with self._reads:
            try:
                row: tuple[int, ...] = self._reader.execute(query).fetchone()
            except sqlite3.Error as error:
                raise Busy(str(error)) from error
        return row

    def close(self) -> None:
        """Let go of the file. Nobody may be at it."""
        for connection in (self._reader, self._writer):
            with suppress(sqlite3.Error):
                connection.close()


def find_rows(connection: sqlite3.Connection, names: Sequence[bytes]) -> dict[bytes, Row]:
    """The rows that there are of these names."""
    found: dict[bytes, Row] = {}
    for some in _batches(names):
        marks = ", ".join("?" * len(some))
        for row in connection.execute(f"SELECT {_COLUMNS} FROM records WHERE name IN ({marks})", some):
            found[row[1]] = Row(*row)
    return found


def _batches(values: Sequence[Value]) -> Iterator[list[Value]]:
    """Parts of a few sizes only, filled up with the last value, so that few statements are compiled."""
    for start in range(0, len(values), _BATCH):
        some = list(values[start : start + _BATCH])
        size = 1 << (len(some) - 1).bit_length()
        yield some + [some[-1]] * (size - len(some))


# -- steps of a transaction


def rows_in(connection: sqlite3.Connection, slab: int, count: int = -1) -> list[Row]:
    """Up to so many visible records of a slab, in the order of their slots; -1 is all."""
    query = f"SELECT {_COLUMNS} FROM records WHERE slab = ? AND owner IS NULL ORDER BY slot LIMIT ?"
    return [Row(*row) for row in connection.execute(query, (slab, count))]


def insert_rows(connection: sqlite3.Connection, rows: Sequence[Row]) -> list[Row]:
    """The same rows with the ids that they have now."""
    last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'records'").fetchone()
    made = [row._replace(id=number) for number, row in enumerate(rows, (last[0] if last else 0) + 1)]
    connection.executemany(f"INSERT INTO records ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", made)
    return made


def release(connection: sqlite3.Connection, ids: Iterable[int], *, owner: str | None = None) -> None:
    """Forget records, whoever owns them or only those of `owner`, and give their slots back unless the slab is gone."""
    numbers = [(number, owner) for number in ids]
    connection.executemany(
        "INSERT OR IGNORE INTO free SELECT r.slot_bytes, r.slab, r.slot FROM records r JOIN slabs s ON s.id = r.slab"
        " WHERE r.id = ?1 AND s.slot_bytes = r.slot_bytes AND (?2 IS NULL OR r.owner = ?2)",
        numbers,
    )
    connection.executemany("DELETE FROM records WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)", numbers)


def empty_slab(connection: sqlite3.Connection, slab: int, slot_bytes: int) -> None:
    """Forget everything in a slab, written or being written."""
    connection.execute("DELETE FROM records WHERE slab = ?", (slab,))
    connection.execute("DELETE FROM free WHERE slot_bytes = ? AND slab = ?", (slot_bytes, slab))


# -- opening


def _connect(path: Path, busy_seconds: float, *, durable: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    try:
        _to_wal(connection, busy_seconds)
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            _make_or_check(connection, path)
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
    except BaseException:
        connection.close()
        raise
    return connection


def _to_wal(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """Two processes that open a new file at once may be refused for a moment, whatever the busy timeout."""
    end = time.monotonic() + max(5.0, busy_seconds)
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _make_or_check(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if (version, application, tables) == (0, 0, 0):
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    elif application != _APPLICATION:
        raise StoreError(f"'{path}' is not the index of a store.", fix="give another directory.")
    elif version != VERSION:
        raise StoreError(
            f"the store in '{path.parent}' has version {version}, and this is for version {VERSION}.",
            fix="give another directory, or remove this one; a store can be filled again.",
        )
