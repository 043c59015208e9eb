"""Opening: makes or checks the directory of a store, and cleans up after processes that died in it.

Opening an index needs room for a log, even to read. So a store keeps a file of some logs' size, the reserve. It is
removed where the disk is full, and made again when there is room.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from quire.errors import InvalidInput, StoreError
from quire.tiers.stores.counts import Counts
from quire.tiers.stores.directory.index import Busy, Index, release
from quire.tiers.stores.directory.owners import Owners
from quire.tiers.stores.directory.room import Room, Uses
from quire.tiers.stores.directory.slab_files import SlabFiles, make_file

logger = logging.getLogger(__name__)

_INDEX = "index.sqlite"
_RESERVE = f"{_INDEX}-reserve"
_RESERVE_BYTES = 1 << 20
_OURS = {_INDEX, _RESERVE, f"{_INDEX}-wal", f"{_INDEX}-shm", f"{_INDEX}-journal", "slabs", "owners", "lost+found"}

TRY_AGAIN = "try again if another process is busy with it; if it is damaged, remove it: a store can be filled again."
Opened: TypeAlias = "tuple[Counts, SlabFiles, Owners, Uses, Room, Index]"


def open_directory(
    path: Path, capacity: int | None, slab_bytes: int | None, direct: bool | None, busy_seconds: float
) -> Opened:
    """Open or make it; see DirectoryStore. On a full disk the store can be read, with a warning.

    Raises StoreError, and InvalidInput for sizes below 1.
    """
    if (capacity is not None and capacity < 1) or (slab_bytes is not None and slab_bytes < 1):
        raise InvalidInput(
            f"a store of {capacity} bytes in slabs of {slab_bytes} holds nothing.", fix="give sizes above zero."
        )
    attempt = partial(_open, path, capacity, slab_bytes, direct, busy_seconds)
    try:
        opened = attempt(full=False)
    except StoreError:
        if not holds_store(path) or not _is_full(path):
            raise
        (path / _RESERVE).unlink(missing_ok=True)
        try:
            opened = attempt(full=True)
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
    """Make the reserve if it is missing; returns whether it is there."""
    try:
        make_file(path / _RESERVE, _RESERVE_BYTES)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def _is_full(folder: Path) -> bool:
    """Whether a file of a reserve's size cannot be written. A test by writing also finds a full quota."""
    probe = folder / f"{_INDEX}-probe-{os.urandom(8).hex()}"
    try:
        make_file(probe, _RESERVE_BYTES)
    except OSError:
        return True
    probe.unlink()
    return False


def _open(
    path: Path, capacity: int | None, slab_bytes: int | None, direct: bool | None, busy_seconds: float, *, full: bool
) -> Opened:
    """With `full`, an index that cannot be written stays as it is. Raises StoreError."""
    with ExitStack() as undo:
        try:
            _check_folder(path, may_be_new=capacity is not None)
            _make_private(path / _INDEX)
            files = SlabFiles(path / "slabs", direct=direct)
            undo.callback(files.close)
            owners = Owners(path / "owners")
            undo.callback(owners.close)
        except OSError as error:
            raise StoreError(
                f"the store '{path}' cannot be used: {error}.", fix="give a directory that this user may write to."
            ) from error
        uses, statistics = Uses(), Counts()
        room = Room(files, owners, uses, statistics, slab_bytes)
        index = Index(path / _INDEX, busy_seconds=busy_seconds, ended=room.settle)
        undo.callback(index.close)
        try:
            with index.writing() as connection:
                _put_in_order(connection, path, files, room, capacity)
            owners.bury()
        except Busy as error:
            if not full:
                raise StoreError(f"the store '{path}' cannot be used: {error}.", fix=TRY_AGAIN) from error
        undo.pop_all()
    return statistics, files, owners, uses, room, index


def _check_folder(path: Path, *, may_be_new: bool) -> None:
    if holds_store(path):
        return
    if path.is_dir():
        found = sorted(entry.name for entry in path.iterdir())
        what = f"it holds '{found[0]}' and no index" if found else "it is empty"
    else:
        found = []
        what = "it is not a directory" if path.exists() else "nothing is there"
    if not may_be_new:
        raise StoreError(
            f"there is no store in '{path}': {what}.",
            fix="give a directory that was served with --storage; one is made where --storage-size is given.",
        )
    if path.exists() and not path.is_dir():
        raise StoreError(f"the store '{path}' cannot be used: {what}.", fix="give a directory.")
    foreign = [name for name in found if name not in _OURS]
    if foreign:
        raise StoreError(
            f"'{path}' is not empty and is no store: it holds '{foreign[0]}'.", fix="give an empty directory."
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _make_private(path: Path) -> None:
    """Make the index with a private mode, which SQLite gives the files beside it. Warn of an older index without it."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if path.stat().st_mode & 0o077:
        logger.warning(
            "others on this machine may read the store '%s'; `chmod -R go= %s` ends that", *[path.parent] * 2
        )


def _put_in_order(
    connection: sqlite3.Connection, path: Path, files: SlabFiles, room: Room, capacity: int | None
) -> None:
    """Drop unfinished records of dead writers and damaged ones; then fit the store into its capacity."""
    before = connection.execute("SELECT value FROM settings WHERE name = 'capacity'").fetchone()
    if capacity is not None and before != (capacity,):
        connection.execute("INSERT OR REPLACE INTO settings VALUES ('capacity', ?)", (capacity,))
    if capacity is None and before is None:
        raise StoreError(f"the store in '{path}' was never given a capacity.", fix="give one (--storage-size).")
    room.reclaim_dead(connection)
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
        files.drop(slab)  # from a transaction that never ended
    if capacity is not None:
        room.shrink(connection, capacity)
