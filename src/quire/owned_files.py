"""Owned files: a path that another user of the machine could have redirected, or could replace, is refused.

A file must be a regular one with no other name, of this user or of its folder's owner. Symbolic links are not followed.
A folder must not be writable by others: only then does what was checked stay so.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def check_folder(path: Path) -> None:
    """Raises OSError unless `path` is a directory, no link to one, that only its owner can write to."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise _refusal(path, "it is a link" if stat.S_ISLNK(status.st_mode) else "it is not a directory")
    if status.st_uid not in (os.geteuid(), 0):
        raise _refusal(path, f"it is of user {status.st_uid}")
    if status.st_mode & 0o022:
        raise _refusal(path, f"other users can write to it; `chmod go-w {path}` ends that")


def check_file(path: Path) -> None:
    """Raises OSError if there is a file that `open_owned` would refuse."""
    try:
        _check(path, path.lstat())
    except FileNotFoundError:
        return


def open_owned(path: Path, flags: int) -> int:
    """A descriptor of the file, not inherited; the caller closes it. Raises OSError, for a foreign file EPERM."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _check(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def make_file(path: Path, num_bytes: int) -> None:
    """Create a private file with all its blocks: a full disk fails here and not at a write. Raises OSError."""
    file = open_owned(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
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


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path, "it is no regular file")
    if status.st_nlink > 1:
        raise _refusal(path, "it has another name elsewhere")
    if status.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        raise _refusal(path, f"it is of user {status.st_uid}")


def _refusal(path: Path, why: str) -> OSError:
    return OSError(errno.EPERM, f"{why}, so another user could choose what is read or written", str(path))
