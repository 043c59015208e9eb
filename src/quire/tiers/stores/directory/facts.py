"""Facts: what a directory is and holds, for people."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from quire.tiers.stores.directory.index import Index
from quire.tiers.stores.directory.owners import Owners
from quire.tiers.stores.directory.slab_files import SlabFiles


@dataclass(frozen=True, slots=True)
class Facts:
    """Bytes are those on the disk: `slab_bytes` never exceed `capacity`; `index_bytes` come beside them.

    `free_bytes` are what could still be stored without forgetting anything. `num_prepared` records are being written.
    """

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


_QUERY = """
SELECT
    (SELECT value FROM settings WHERE name = 'capacity'),
    (SELECT COALESCE(SUM(num_bytes), 0) FROM slabs),
    (SELECT COALESCE(SUM(slot_bytes), 0) FROM records),
    (SELECT COUNT(*) FROM slabs),
    (SELECT COUNT(*) FROM records WHERE owner IS NOT NULL)
"""


def facts_of(path: Path, files: SlabFiles, owners: Owners, index: Index) -> Facts:
    """Gathered now. Raises Busy and OSError."""
    with index.reading as connection:
        capacity, slab_bytes, taken, num_slabs, num_prepared = connection.execute(_QUERY).fetchone()
    disk = os.statvfs(path)
    return Facts(
        path=str(path),
        direct=files.direct,
        capacity=capacity,
        slab_bytes=slab_bytes,
        free_bytes=capacity - taken,
        index_bytes=sum(file.stat().st_size for file in path.glob("index.sqlite*")),
        disk_free_bytes=disk.f_bavail * disk.f_frsize,
        num_slabs=num_slabs,
        num_prepared=num_prepared,
        num_owners=owners.count(),
    )
