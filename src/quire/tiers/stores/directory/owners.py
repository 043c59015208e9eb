"""Owners: the processes that have the directory open. Each locks its own file, and the lock ends with the process."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Owners:
    """This process as an owner, and the state of the others. It is a lock and not a process id, because ids are reused
    and differ between containers. A file is unlinked only under its lock."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError if files cannot be created or locked."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        while True:
            self.name = secrets.token_hex(8)
            self._file = os.open(folder / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            except OSError:
                self.close()
                raise
            if os.fstat(self._file).st_nlink:
                return
            os.close(self._file)  # it was unlinked before it was locked

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
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
