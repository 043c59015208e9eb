"""The memory that this process can still allocate on the host: the minimum of the system's and its containers' limits.

A control group limits everything below it, so a process has a limit for each ancestor of its group. A group is also
charged for cached files, which the system would drop at once; they count as available.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
from filelock import BaseFileLock, FileLock, Timeout

from quire.plan.host import HostMemory

logger = logging.getLogger(__name__)

_UNLIMITED = 2**60
_LOCK = "quire-host-memory.lock"
_PATIENCE_S = 300.0  # a process that touches a terabyte takes a minute


class _Version(NamedTuple):
    """A version of control groups: its mount, and the files with limits, usage, and the part of it that is files."""

    mount: str
    limits: tuple[str, ...]
    usage: str
    inactive: str


_VERSION_1 = _Version(
    "sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
)
_VERSION_2 = _Version("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read now from the system, and from the control groups of this process and all their ancestors, version 1 or 2.

    `root` is where the system's files start.
    """
    memory = psutil.virtual_memory()
    limits = list(_limits(root))
    left = min((limit - used for limit, used in limits), default=int(memory.available))
    return HostMemory(
        total=int(memory.total),
        available=max(0, min(int(memory.available), left)),
        limit=min((limit for limit, _ in limits), default=None),
    )


@contextmanager
def alone_on_this_host(folder: Path | None = None) -> Iterator[None]:
    """A lock while memory is measured and allocated: without it, two processes could both get the same memory.

    `folder` has the lock's file; the default is the folder for temporary files. A process that cannot write there uses
    no lock. No process waits much longer than `_PATIENCE_S`. A process that dies releases the lock.
    """
    lock = FileLock((folder or Path(tempfile.gettempdir())) / _LOCK, mode=0o666)
    try:
        _acquire(lock)
    except OSError as error:
        logger.warning("host memory is taken without a lock: %s", error)
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: BaseFileLock) -> None:
    for patience_s, then in ((1.0, "waiting for it"), (_PATIENCE_S, "not waiting any longer")):
        try:
            lock.acquire(timeout=patience_s, poll_interval=0.02)
            return
        except Timeout:
            logger.warning("another process on this machine takes host memory: %s", then)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Each limit, and how much of it is used."""
    for line in _lines(root / "proc/self/cgroup"):  # 4:memory:/a/b in version 1, 0::/a/b in version 2
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            version = _VERSION_1
        elif number == "0" and not controllers:
            version = _VERSION_2
        else:
            continue
        mount = root / version.mount
        folder = _folder(mount, path.strip("/").split("/"))
        for group in (folder, *folder.parents):
            yield from _limits_of(group, version)
            if group == mount:
                break


def _folder(mount: Path, names: list[str]) -> Path:
    """The folder of a group; a container may have its own group mounted, and see the host's names above it."""
    ends = [mount.joinpath(*names[first:]) for first in range(len(names))] if ".." not in names else []
    return next((folder for folder in ends if folder.is_dir()), mount)


def _limits_of(folder: Path, version: _Version) -> Iterator[tuple[int, int]]:
    limits = [_number(folder / name) for name in version.limits]
    found = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    used = _number(folder / version.usage)
    if found and used is not None:
        files = dict(line.split()[:2] for line in _lines(folder / "memory.stat")).get(version.inactive, "0")
        yield min(found), max(0, used - int(files))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
