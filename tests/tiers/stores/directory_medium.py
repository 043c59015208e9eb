"""DirectoryMedium: the slabs and the index of a directory, read and damaged with plain files and SQL."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from quire.tiers.store import StoreKey


class DirectoryMedium:
    """Knows the files of a directory, and none of the code that writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def query(self, sql: str, *values: object) -> list[tuple[int, ...]]:
        with closing(sqlite3.connect(self.path / "index.sqlite", timeout=10)) as connection, connection:
            return connection.execute(sql, values).fetchall()

    def slab(self, number: int) -> Path:
        return self.path / "slabs" / f"{number:012x}.slab"

    def slab_of(self, key: StoreKey) -> Path:
        where = self._where(key)
        assert where is not None
        return self.slab(where[0])

    def read(self, key: StoreKey) -> bytes | None:
        where = self._where(key)
        if where is None:
            return None
        slab, offset, num_bytes = where
        with open(self.slab(slab), "rb") as file:
            file.seek(offset)
            found = file.read(num_bytes)
        ((lead,),) = self.query("SELECT lead FROM records WHERE name = ?", key.pack())
        return found[num_bytes - lead :] + found[: num_bytes - lead]

    def write(self, key: StoreKey, record: bytes) -> None:
        """A slab can only be cut at its end: everything after it goes too."""
        where = self._where(key)
        assert where is not None
        slab, offset, num_bytes = where
        with open(self.slab(slab), "r+b") as file:
            file.seek(offset)
            file.write(record)
            if len(record) < num_bytes:
                file.truncate(offset + len(record))
            os.fsync(file.fileno())

    def delete(self, key: StoreKey) -> None:
        self.query("INSERT INTO free SELECT slot_bytes, slab, slot FROM records WHERE name = ?", key.pack())
        self.query("DELETE FROM records WHERE name = ?", key.pack())

    def keys(self) -> set[StoreKey]:
        rows: list[tuple[bytes]] = self.query("SELECT name FROM records WHERE owner IS NULL")  # type: ignore[assignment]
        return {StoreKey.unpack(name) for (name,) in rows}

    def check(self) -> None:
        """The law of the index, and that the files are what it says: no slot is lost and none has two records."""
        slabs = self.query("SELECT id, slot_bytes, num_slots, num_bytes, fresh FROM slabs")
        free = self.query("SELECT slab, slot, slot_bytes FROM free")
        records = self.query("SELECT slab, slot, slot_bytes, num_bytes FROM records")
        ((capacity,),) = self.query("SELECT value FROM settings WHERE name = 'capacity'")
        assert sum(num_bytes for _, _, _, num_bytes, _ in slabs) <= capacity
        for slab, slot_bytes, num_slots, num_bytes, fresh in slabs:
            assert slot_bytes % 4096 == 0 and num_slots * slot_bytes <= num_bytes and 0 <= fresh <= num_slots
            given = sorted(
                [slot for of, slot, size in free if of == slab and size == slot_bytes]
                + [slot for of, slot, size, _ in records if of == slab and size == slot_bytes]
            )
            assert given == list(range(fresh)), f"slab {slab}: slots {given} of {fresh} handed out"
        assert {of for of, *_ in free} | {of for of, *_ in records} <= {slab for slab, *_ in slabs}
        assert all(num_bytes <= slot_bytes for _, _, slot_bytes, num_bytes in records)
        on_disk = {int(path.stem, 16) for path in (self.path / "slabs").glob("*.slab")}
        assert on_disk == {slab for slab, *_ in slabs}, "files without a slab, or slabs without a file"

    def disk_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in (self.path / "slabs").glob("*.slab"))

    def _where(self, key: StoreKey) -> tuple[int, int, int] | None:
        rows = self.query(
            "SELECT slab, slot * slot_bytes, num_bytes FROM records WHERE name = ? AND owner IS NULL", key.pack()
        )
        return None if not rows else (rows[0][0], rows[0][1], rows[0][2])
