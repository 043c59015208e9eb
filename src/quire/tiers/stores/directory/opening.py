"""Opening: creates or checks the directory of a store, and cleans up after processes that died in it.

Opening an index needs disk space for a log, even to read it. So a store keeps a reserve, a file as large as some logs.
It is removed if the disk is full, and created again when there is space.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import ExitStack, suppress
from pathlib import Path

from quire.errors import InvalidInput, StoreError
from quire.owned_files import check_file, check_folder, make_file, open_owned
from quire.tiers.stores.directory.index import Busy, Index, Owners, release, rows_where
from quire.tiers.stores.directory.slab_allocator import SlabAllocator
from quire.tiers.stores.directory.slab_files import SlabFiles

logger = logging.getLogger(__name__)

_INDEX = "index.sqlite"
_RESERVE = f"{_INDEX}-reserve"
_RESERVE_BYTES = 1 << 20
_OURS = {_INDEX, _RESERVE, f"{_INDEX}-wal", f"{_INDEX}-shm", f"{_INDEX}-journal", "slabs", "owners", "lost+found"}

TRY_AGAIN = "try again if another process is busy with it; if it is damaged, remove it: a store can be filled again."


def open_directory(
    path: Path, capacity: int | None, slab_bytes: int | None, *, direct: bool | None, threads: int, busy_seconds: float
) -> tuple[Index, SlabAllocator]:
    """Open or create it; see `DirectoryStore`. On a full disk the store can be read, with a warning. Raises StoreError,
    and InvalidInput for sizes below 1."""
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
                owners.remove_dead()
            except Busy as error:
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
            fix="give a directory that was served with --storage; one is made where --storage-size is given.",
        )
    if is_other:
        raise StoreError(f"the store '{path}' cannot be used: it is not a directory.", fix="give a directory.")
    foreign = [name for name in found if name not in _OURS]
    if foreign:
        raise StoreError(
            f"'{path}' is not empty and is no store: it holds '{foreign[0]}'.", fix="give an empty directory."
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


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
    """Drop unfinished records of dead writers and damaged ones; then reduce the store to its capacity."""
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
    if capacity is not None:
        allocator.shrink(connection, capacity)
