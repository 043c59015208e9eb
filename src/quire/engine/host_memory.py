"""What this process may still take of the host's memory: the smaller of what is free and what its container leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
_UNLIMITED = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes. `limit` is the container's, None where it has none; `available` respects it."""

    total: int
    available: int
    limit: int | None


def host_memory() -> HostMemory:
    """Read now from the system and from the control group, version 1 or 2."""
    memory = psutil.virtual_memory()
    limits = [found for paths in _CGROUPS if (found := _limit(*paths)) is not None]
    left = min((limit - used for limit, used in limits), default=int(memory.available))
    return HostMemory(
        total=int(memory.total),
        available=max(0, min(int(memory.available), left)),
        limit=min((limit for limit, _ in limits), default=None),
    )


def _limit(limit: Path, usage: Path) -> tuple[int, int] | None:
    try:
        most, used = limit.read_text().strip(), usage.read_text().strip()
    except OSError:
        return None
    return (int(most), int(used)) if most.isdigit() and int(most) < _UNLIMITED else None
