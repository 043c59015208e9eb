"""Opening: a directory becomes a store, or is found to be one, and is put in order after whoever died in it."""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.errors import InvalidInput, StoreError
from quire.tiers.stores.directory.index import Busy, Index, release
from quire.tiers.stores.directory.owners import Owners
from quire.tiers.stores.directory.reserve import give_up_reserve, is_full, keep_reserve
from quire.tiers.stores.directory.room import Room, reclaim
from quire.tiers.stores.directory.slab_files import SlabFiles

logger = logging.getLogger(__name__)

INDEX = "index.sqlite"
RESERVE = f"{INDEX}-reserve"
_OURS = {INDEX, RESERVE, f"{INDEX}-wal", f"{INDEX}-shm", f"{INDEX}-journal", "slabs", "owners", "lost+found"}


_FIX = "try again if another process is busy with it; if it is damaged, remove it: a store can be filled again."


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of an opened store, and how many records of dead writers were dropped."""

    files: SlabFiles
    owners: Owners
    index: Index
    room: Room
    reclaimed: int


def open_directory(
    path: Path, capacity: int | None, *, slab_bytes: int | None, direct: bool | None, durable: bool, busy_seconds: float
) -> Opened:
    """Open or make it; see DirectoryStore. On a full disk what is stored is read, and it is said so.

    Raises StoreError, and InvalidInput for sizes that make no sense.
    """
    if (capacity is not None and capacity < 1) or (slab_bytes is not None and slab_bytes < 1):
        raise InvalidInput(
            f"a store of {capacity} bytes in slabs of {slab_bytes} holds nothing.", fix="give sizes above zero."
        )

    def attempt(*, full: bool) -> Opened:
        return _open(path, capacity, slab_bytes, direct, durable, busy_seconds, full=full)

    try:
        opened = attempt(full=False)
    except StoreError:
        if not holds_store(path) or not is_full(path):
            raise
        give_up_reserve(path / RESERVE)
        try:
            opened = attempt(full=True)
        except StoreError as error:
            raise StoreError(
                f"the disk of '{path}' is full, and the store cannot be opened: {error.message}",
                fix="make room for some MiB on it; what is stored is not lost.",
            ) from error
    if not keep_reserve(path / RESERVE):
        logger.warning("the disk of '%s' is full: what is stored is read, and no more stored than has room", path)
    return opened


def _open(
    path: Path,
    capacity: int | None,
    slab_bytes: int | None,
    direct: bool | None,
    durable: bool,
    busy_seconds: float,
    *,
    full: bool,
) -> Opened:
    """With `full`, what cannot be put in order now is left as it is. Raises StoreError."""
    try:
        _check_folder(path, may_be_new=capacity is not None)
        _make_private(path / INDEX)
        files = SlabFiles(path / "slabs", direct=direct)
        owners = Owners(path / "owners")
    except OSError as error:
        raise StoreError(
            f"the store '{path}' cannot be used: {error}.", fix="give a directory that this user may write to."
        ) from error
    try:
        index = Index(path / INDEX, busy_seconds=busy_seconds, durable=durable)
        room = Room(files, slab_bytes)
        reclaimed = 0
        try:
            with index.writing(room.settle) as connection:
                reclaimed = _put_in_order(connection, path, files, owners, room, capacity)
            owners.bury()
        except Busy as error:
            if not full:
                index.close()
                raise StoreError(f"the store '{path}' cannot be used: {error}.", fix=_FIX) from error
        except BaseException:
            index.close()
            raise
    except BaseException:
        files.close()
        owners.close()
        raise
    return Opened(files, owners, index, room, reclaimed)


def holds_store(path: Path) -> bool:
    """Whether a directory is a store already; a new one can be made where nothing is, or only what a disk brings."""
    return (path / INDEX).exists()


def reclaim_dead(connection: sqlite3.Connection, owners: Owners) -> int:
    """Drop what dead writers had prepared; returns how many records that were. Inside a transaction."""
    names = connection.execute("SELECT DISTINCT owner FROM records WHERE owner IS NOT NULL").fetchall()
    return sum(reclaim(connection, name) for (name,) in names if name != owners.name and owners.is_dead(name))


def _check_folder(path: Path, *, may_be_new: bool) -> None:
    if may_be_new and path.exists() and not path.is_dir():
        raise StoreError(f"the store '{path}' cannot be used: it is not a directory.", fix="give a directory.")
    if may_be_new:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    if not may_be_new and not holds_store(path):
        raise StoreError(
            f"there is no store in '{path}': {_what_is(path)}.",
            fix="give a directory that was served with --storage; one is made where --storage-size is given.",
        )
    foreign = sorted({entry.name for entry in path.iterdir()} - _OURS)
    if foreign and not holds_store(path):
        raise StoreError(
            f"'{path}' is not empty and is no store: it holds '{foreign[0]}'.", fix="give an empty directory."
        )


def _make_private(path: Path) -> None:
    """SQLite gives the files beside an index its mode. One that was made before keeps what it has, and is told of."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if path.stat().st_mode & 0o077:
        logger.warning(
            "others on this machine may read the store '%s'; `chmod -R go= %s` ends that", *[path.parent] * 2
        )


def _what_is(path: Path) -> str:
    if not path.exists():
        return "nothing is there"
    if not path.is_dir():
        return "it is not a directory"
    found = sorted(entry.name for entry in path.iterdir())
    return f"it holds '{found[0]}' and no index" if found else "it is empty"


def _put_in_order(
    connection: sqlite3.Connection, path: Path, files: SlabFiles, owners: Owners, room: Room, capacity: int | None
) -> int:
    """What died or was damaged while nobody looked is dropped; then the store fits its capacity."""
    before = connection.execute("SELECT value FROM settings WHERE name = 'capacity'").fetchone()
    if capacity is not None and before != (capacity,):
        connection.execute("INSERT OR REPLACE INTO settings VALUES ('capacity', ?)", (capacity,))
    if capacity is None and before is None:
        raise StoreError(f"the store in '{path}' was never given a capacity.", fix="give one (--storage-size).")
    reclaimed = reclaim_dead(connection, owners)
    slabs = connection.execute("SELECT id, slot_bytes, num_bytes FROM slabs").fetchall()
    for slab, slot_bytes, num_bytes in slabs:
        size = files.size(slab)
        if size is None:
            room.drop(connection, slab, slot_bytes)
        elif size < num_bytes:
            cut = connection.execute(
                "SELECT id FROM records WHERE slab = ? AND slot * slot_bytes + num_bytes > ? AND owner IS NULL",
                (slab, size),
            ).fetchall()
            release(connection, (number for (number,) in cut))
    for slab in files.numbers() - {slab for slab, *_ in slabs}:
        files.drop(slab)  # made in a transaction that never ended
    if capacity is not None:
        room.shrink(connection, capacity)
    return reclaimed
