"""SlabFiles: the files of records, with direct I/O where the filesystem allows it."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from itertools import islice
from pathlib import Path
from threading import Lock

BLOCK = 4096  # O_DIRECT requires that offsets, lengths and addresses are multiples of this
_DIRECT = getattr(os, "O_DIRECT", 0)


class SlabFile:
    """An open slab. Its descriptor is closed with the last reference, so that no transfer under way loses it."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed."""
        return os.fstat(self.descriptor).st_nlink == 0


class SlabFiles:
    """Slab files by number, for any thread. A number is never reused, so an old file is never taken for a new one.

    `direct` says whether I/O bypasses the page cache.
    """

    def __init__(self, folder: Path, *, direct: bool | None) -> None:
        """`direct` None: where the filesystem can. Raises OSError where files cannot be made, or not with `direct`."""
        self._folder = folder
        self._lock = Lock()
        self._files: dict[int, SlabFile] = {}
        folder.mkdir(mode=0o700, exist_ok=True)
        possible = _can_be_direct(folder)
        if direct and not possible:
            raise OSError(errno.EINVAL, "this filesystem cannot read and write around the page cache")
        self.direct = possible if direct is None else direct

    def path(self, slab: int) -> Path:
        """The path of a slab."""
        return self._folder / f"{slab:012x}.slab"

    def numbers(self) -> set[int]:
        """The slabs that have a file."""
        return {int(path.stem, 16) for path in self._folder.glob("*.slab")}

    def size(self, slab: int) -> int | None:
        """Bytes of the file; None where there is none."""
        try:
            return self.path(slab).stat().st_size
        except OSError:
            return None

    def open(self, slab: int) -> SlabFile | None:
        """The file, open while the caller refers to it; None where it was removed."""
        with self._lock:
            file = self._files.get(slab)
            if file is not None:
                if not file.is_gone:
                    return file
                del self._files[slab]
                return None
            flags = os.O_RDWR | os.O_CLOEXEC | (_DIRECT if self.direct else 0)
            try:
                descriptor = os.open(self.path(slab), flags)
            except OSError:
                return None
            file = self._files[slab] = SlabFile(descriptor)
            return file

    def drop(self, slab: int) -> None:
        """Remove a file that has no records. Its bytes are free at once, even while other processes have it open."""
        with suppress(OSError):
            os.truncate(self.path(slab), 0)
        with suppress(OSError):
            self.path(slab).unlink(missing_ok=True)
        with self._lock:
            self._files.pop(slab, None)

    def close_removed(self) -> None:
        """Close files that another process has removed; until then the disk keeps their blocks."""
        with self._lock:
            for slab in [slab for slab, file in self._files.items() if file.is_gone]:
                del self._files[slab]

    def sync(self, slabs: set[int]) -> None:
        """Flush writes to these slabs to the disk. Raises OSError."""
        for slab in slabs:
            file = self.open(slab)
            if file is None:
                raise OSError(errno.ENOENT, f"slab {slab} is gone")
            os.fdatasync(file.descriptor)

    def close(self) -> None:
        """Close all files that no transfer uses."""
        with self._lock:
            self._files.clear()


def make_file(path: Path, num_bytes: int) -> None:
    """Make a file with all its blocks, so that a full disk fails here and not at a write. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
        else:
            for start in range(0, num_bytes, 1 << 20):
                os.pwrite(file, bytes(min(1 << 20, num_bytes - start)), start)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def _can_be_direct(folder: Path) -> bool:
    """Whether a block can be written and read with O_DIRECT; some filesystems open such a file and then refuse. A full
    disk is tested by reading an existing slab. Raises OSError where no file can be made."""
    probe = folder / f"probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        make_file(probe, BLOCK)
        return _moves_direct(probe, writes=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return any(_moves_direct(slab, writes=False) for slab in islice(folder.glob("*.slab"), 1))
    finally:
        probe.unlink(missing_ok=True)


def _moves_direct(path: Path, *, writes: bool) -> bool:
    with mmap.mmap(-1, BLOCK) as block, suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | _DIRECT)
        try:
            is_written = not writes or os.pwrite(file, block, 0) == BLOCK
            return bool(_DIRECT) and is_written and os.preadv(file, [block], 0) == BLOCK
        finally:
            os.close(file)
    return False
