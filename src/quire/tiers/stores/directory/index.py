"""Index: the place of each record, in SQLite, shared by all processes that have the directory open (`Owners`).

    slabs    files of equal slots; `fresh` is the first slot that was never used
    free     slots that were given back
    records  the record in a slot. One with an owner is being written and not visible. `id` is never reused, so a record
             whose id exists after its bytes were read was not overwritten meanwhile

Invariant: a slot below `fresh` is in exactly one of `free` and `records`; any other slot is in neither.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from quire.errors import StoreError
from quire.owned_files import check_folder, open_owned

VERSION = 2
LOG_BYTES = 8 << 20  # the log shrinks to this after a checkpoint (every 4 MiB); a long read delays that
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
    slot_bytes INTEGER NOT NULL, num_bytes INTEGER NOT NULL, used INTEGER NOT NULL, owner TEXT,
    lead INTEGER NOT NULL DEFAULT 0, UNIQUE (slab, slot)
);
CREATE INDEX by_use ON records (slot_bytes, used) WHERE owner IS NULL;
CREATE INDEX by_owner ON records (owner) WHERE owner IS NOT NULL;
"""


class Row(NamedTuple):
    """A record's place. `used` is in microseconds of the wall clock; `owner` is None for a visible record. Its first
    `lead` bytes are after all others, so that these are on a block boundary."""

    id: int
    name: bytes
    slab: int
    slot: int
    slot_bytes: int
    num_bytes: int
    used: int
    owner: str | None
    lead: int = 0

    @property
    def offset(self) -> int:
        """The record's first byte in the slab's file."""
        return self.slot * self.slot_bytes


TRY_AGAIN = "try again if another process is busy with it; if it is damaged, remove it: a store can be filled again."

_COLUMNS = ", ".join(Row._fields)


class Busy(Exception):
    """The index cannot be read or written now: another process uses it, the disk is full, or the file is damaged."""


class Index:
    """Two connections, for any thread. The next transaction also drops the process' records in `to_drop`."""

    def __init__(self, path: Path, *, busy_seconds: float, ended: Callable[[bool], None]) -> None:
        """Open or create the file. `ended(committed)` is called after each transaction, before another thread's. Raises
        StoreError if the file is not an index of this version."""
        self.to_drop: set[int] = set()
        self._reads, self._writes = Lock(), Lock()
        self._busy_ms = int(busy_seconds * 1000)
        self._ended = ended
        try:
            self._writer = _connect(path, busy_seconds)
            self._reader = _connect(path, busy_seconds)
        except sqlite3.Error as error:
            is_busy = getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
            fix = "remove the directory if it is no store of yours, or is damaged; a store can be filled again."
            raise StoreError(
                f"the index '{path}' cannot be opened: {error}.", fix=TRY_AGAIN if is_busy else fix
            ) from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection for reading, which never waits for a writer; statements see the latest commit. Raises Busy."""
        with self._reads:
            try:
                yield self._reader
            except sqlite3.Error as error:
                raise Busy(str(error)) from error

    @contextmanager
    def writing(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction that excludes other writers. Raises Busy, changing nothing; without `wait` at once."""
        if not self._writes.acquire(blocking=wait):
            raise Busy("another thread is writing")
        try:
            if not wait:
                self._writer.execute("PRAGMA busy_timeout = 0")
            self._writer.execute("BEGIN IMMEDIATE")
            committed = False
            dropped = tuple(self.to_drop)
            try:
                release(self._writer, dropped)
                yield self._writer
                self._writer.execute("COMMIT")
                committed = True
                self.to_drop.difference_update(dropped)
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                self._ended(committed)
        except sqlite3.Error as error:
            raise Busy(str(error)) from error
        finally:
            if not wait:
                with suppress(sqlite3.Error):
                    self._writer.execute(f"PRAGMA busy_timeout = {self._busy_ms}")
            self._writes.release()

    def close(self) -> None:
        """After all calls have ended."""
        for connection in (self._reader, self._writer):
            with suppress(sqlite3.Error):
                connection.close()


def rows_where(connection: sqlite3.Connection, condition: str, values: Sequence[Any]) -> list[Row]:
    """Records that meet a condition, which may end in an order and a limit."""
    return list(map(Row._make, connection.execute(f"SELECT {_COLUMNS} FROM records WHERE {condition}", values)))


def find_rows(connection: sqlite3.Connection, names: Sequence[bytes]) -> dict[bytes, Row]:
    """The rows with these names, of visible records and others."""
    return {row[1]: Row._make(row) for row in _select(connection, _COLUMNS, "name", names)}


def find_owners(connection: sqlite3.Connection, names: Sequence[bytes]) -> dict[bytes, str | None]:
    """The owners of the records with these names; None for a visible one."""
    return dict(_select(connection, "name, owner", "name", names))


def find_visible(connection: sqlite3.Connection, ids: Sequence[int]) -> set[int]:
    """Those of these records that are visible, in their old places."""
    return {number for number, owner in _select(connection, "id, owner", "id", ids) if owner is None}


def _select(connection: sqlite3.Connection, columns: str, key: str, values: Sequence[Any]) -> list[Any]:
    """In batches of few sizes, padded with the last value, so that few statements are compiled."""
    rows: list[Any] = []
    for start in range(0, len(values), _BATCH):
        some = list(values[start : start + _BATCH])
        some += some[-1:] * ((1 << (len(some) - 1).bit_length()) - len(some))
        rows += connection.execute(f"SELECT {columns} FROM records WHERE {key} IN ({', '.join('?' * len(some))})", some)
    return rows


@dataclass(frozen=True, slots=True)
class Facts:
    """The state of a directory. Bytes are on the disk: `slab_bytes` never exceed `capacity`, which does not include
    `index_bytes`. `free_bytes` can be stored without evicting. `num_prepared` records are being written."""

    path: str
    direct: bool
    capacity: int
    slab_bytes: int
    free_bytes: int
    index_bytes: int
    disk_free_bytes: int
    num_slabs: int
    num_prepared: int
    num_owners: int


FACTS = """
SELECT
    (SELECT value FROM settings WHERE name = 'capacity'),
    (SELECT COALESCE(SUM(num_bytes), 0) FROM slabs),
    (SELECT COALESCE(SUM(slot_bytes), 0) FROM records),
    (SELECT COUNT(*) FROM slabs),
    (SELECT COUNT(*) FROM records WHERE owner IS NOT NULL)
"""


def insert_rows(connection: sqlite3.Connection, rows: Sequence[Row]) -> list[Row]:
    """Insert rows; returns them with their new ids."""
    last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'records'").fetchone()
    made = [row._replace(id=number) for number, row in enumerate(rows, (last[0] if last else 0) + 1)]
    connection.executemany(f"INSERT INTO records ({_COLUMNS}) VALUES ({', '.join('?' * len(Row._fields))})", made)
    return made


def release(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    """Delete records, and free their slots unless the slab was removed."""
    numbers = [(number,) for number in ids]
    if not numbers:
        return
    connection.executemany(
        "INSERT OR IGNORE INTO free SELECT r.slot_bytes, r.slab, r.slot FROM records r JOIN slabs s ON s.id = r.slab"
        " WHERE r.id = ? AND s.slot_bytes = r.slot_bytes",
        numbers,
    )
    connection.executemany("DELETE FROM records WHERE id = ?", numbers)


def reclaim(connection: sqlite3.Connection, owner: str) -> int:
    """Drop the unfinished records of an owner; returns their number."""
    rows = connection.execute("SELECT id FROM records WHERE owner = ?", (owner,)).fetchall()
    release(connection, (number for (number,) in rows))
    return len(rows)


def empty_slab(connection: sqlite3.Connection, slab: int, slot_bytes: int) -> int:
    """Delete all records of a slab, visible or not; returns their number."""
    connection.execute("DELETE FROM free WHERE slot_bytes = ? AND slab = ?", (slot_bytes, slab))
    return connection.execute("DELETE FROM records WHERE slab = ?", (slab,)).rowcount


def _connect(path: Path, busy_seconds: float) -> sqlite3.Connection:
    # SQLite would take a relative path that begins with "file:" for a URI.
    connection = sqlite3.connect(path.absolute(), timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    try:
        _to_wal(connection, busy_seconds)
        connection.executescript(
            "PRAGMA synchronous = NORMAL; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -16384;"
            f"PRAGMA journal_size_limit = {LOG_BYTES}"
        )
        connection.execute("BEGIN IMMEDIATE")
        _make_or_check(connection, path)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()  # and undo what was begun
        raise
    return connection


def _to_wal(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """If two processes open a new file at once, SQLite refuses them for a moment, whatever the busy timeout."""
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
    elif version == 1:
        connection.execute("ALTER TABLE records ADD COLUMN lead INTEGER NOT NULL DEFAULT 0")
        connection.execute(f"PRAGMA user_version = {VERSION}")
    elif version != VERSION:
        raise StoreError(
            f"the store in '{path.parent}' has version {version}, and this is for version {VERSION}.",
            fix="give another directory, or remove this one; a store can be filled again.",
        )


class Owners:
    """The processes that have the directory open, this one by `name`. Each locks its own file, which is unlinked only
    under the lock. Process ids would be reused, and differ between containers."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError if files cannot be created or locked."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        check_folder(folder)
        while True:
            self.name = secrets.token_hex(8)
            self._file = open_owned(folder / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            except OSError:
                self.close()
                raise
            if os.fstat(self._file).st_nlink:
                return
            os.close(self._file)  # the file was unlinked before it was locked

    def is_dead(self, name: str) -> bool:
        """Whether that owner has ended or closed the store; False if this is unknown."""
        if name == self.name:
            return False
        try:
            with _locked(self._folder / name):
                return True
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def remove_dead(self) -> None:
        """Remove the files of dead owners, after their unfinished records were dropped."""
        for path in list(self._folder.iterdir()):
            with suppress(OSError), _locked(path):
                path.unlink()

    def count(self) -> int:
        """The number of live owners, with this one."""
        return sum(not self.is_dead(path.name) for path in list(self._folder.iterdir()))

    def close(self) -> None:
        """Release the lock, so that other processes see this owner as dead."""
        with suppress(OSError):
            (self._folder / self.name).unlink(missing_ok=True)
            os.close(self._file)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock of an owner's file, for the block. Raises OSError while the owner is alive."""
    file = open_owned(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
