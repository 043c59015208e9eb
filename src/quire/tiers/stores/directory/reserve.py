"""Reserve: room on the disk that is kept for opening a store on a disk that others have filled.

An index that nobody has open has no log, and to open it takes a new one, even to read. So a closed store keeps a file
that is worth some logs, which is removed when nothing else helps, and made again when there is room.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

RESERVE_BYTES = 1 << 20


def keep_reserve(path: Path) -> bool:
    """Whether the file is there; it is made if need be, for its owner alone."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return True
    except OSError:
        return False
    try:
        _allocate(file)
        return True
    except OSError:
        give_up_reserve(path)
        return False
    finally:
        os.close(file)


def give_up_reserve(path: Path) -> None:
    """The disk has its bytes, until it is kept again."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def is_full(folder: Path) -> bool:
    """Whether as much as a reserve cannot be written here. Asked of the disk, as a quota may be full before it is."""
    probe = folder / f"index.sqlite-probe-{os.urandom(8).hex()}"
    is_kept = keep_reserve(probe)
    give_up_reserve(probe)
    return not is_kept


def _allocate(file: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, RESERVE_BYTES)
    else:
        os.pwrite(file, bytes(RESERVE_BYTES), 0)
