"""The memory that this process can still allocate on the host: the minimum of the system's and its containers' limits.

A control group limits everything below it, so a process has a limit for each ancestor of its group. A group is also
charged for cached files, which the system would drop at once; they count as available.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

logger = logging.getLogger(__name__)

_UNLIMITED = 2**60
_LOCK = "quire-host-memory.lock"
_PATIENCE_S = 300.0  # a process that touches a terabyte takes a minute


class _Version(NamedTuple):
    """The files of one version of control groups: limits, charges, and the part of the charges that can be dropped."""

    limits: tuple[str, ...]
    usage: str
    inactive: tuple[str, ...]


_VERSION_1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "inactive_file"))
_VERSION_2 = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file",))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes. `limit` is the smallest of the containers around this process, None without any; `available` respects all
    of them."""

    total: int
    available: int
    limit: int | None


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
    no lock. No process waits longer than `_PATIENCE_S`. A process that dies releases the lock.
    """
    try:
        file = os.open((folder or Path(tempfile.gettempdir())) / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        logger.warning("host memory is taken without a lock: %s", error)
        yield
        return
    try:
        _wait_for(file)
        yield
    finally:
        os.close(file)


def _wait_for(file: int) -> None:
    began, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - began
        else:
            return
        if waited > _PATIENCE_S:
            logger.warning("another process takes host memory for %.0f s; not waiting any longer", waited)
            return
        if waited > 1 and not said:
            logger.warning("waiting for another process on this machine, which takes host memory")
            said = True
        time.sleep(0.02)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Each limit, and how much of it is used."""
    for version, mount, folder in _groups(root):
        while True:
            yield from _limits_of(folder, version)
            if folder == mount:
                break
            folder = folder.parent


def _limits_of(folder: Path, version: _Version) -> Iterator[tuple[int, int]]:
    used = _number(folder / version.usage)
    if used is None:
        return
    found = [most for name in version.limits if (most := _number(folder / name)) is not None and most < _UNLIMITED]
    if found:
        yield min(found), max(0, used - _inactive(folder / "memory.stat", version.inactive))


def _groups(root: Path) -> Iterator[tuple[_Version, Path, Path]]:
    """For each hierarchy that may limit memory: its mount point, and the folder of this process's group in it."""
    paths = dict(_own_paths(root))
    for line in _lines(root / "proc/self/mountinfo"):
        # 32 31 0:29 /docker/1f /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), (after.split() + [""] * 3)[:3]
        if kind == "cgroup2":
            version = _VERSION_2
        elif kind == "cgroup" and "memory" in options.split(","):
            version = _VERSION_1
        else:
            continue
        if version in paths and len(fields) > 4:
            mount = root / fields[4].lstrip("/")
            yield version, mount, _below(mount, fields[3], paths[version])


def _own_paths(root: Path) -> Iterator[tuple[_Version, str]]:
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield _VERSION_2, path
        elif "memory" in controllers.split(","):
            yield _VERSION_1, path


def _below(mount: Path, mounted: str, path: str) -> Path:
    """The folder of the group at `path`, if the group `mounted` is at `mount`; `mount` if it is not below that."""
    found, top = PurePosixPath(path), PurePosixPath(mounted)
    if ".." in found.parts or not found.is_relative_to(top):
        return mount
    folder = mount / found.relative_to(top)
    return folder if folder.is_dir() else mount


def _inactive(path: Path, names: tuple[str, ...]) -> int:
    found = dict(line.split()[:2] for line in _lines(path) if len(line.split()) == 2)
    return next((int(found[name]) for name in names if found.get(name, "").isdigit()), 0)


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
