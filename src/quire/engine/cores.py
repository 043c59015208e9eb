"""The CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that the system lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota_cores() -> float | None:
    """The share of time that a container grants, in cores; None without a limit."""
    try:
        quota, _, period = _QUOTA.read_text().strip().partition(" ")
    except OSError:
        return None
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def available_cores() -> int:
    """How many threads can run at once, at least one."""
    return min(usable_cores(), math.ceil(quota_cores() or usable_cores()))
