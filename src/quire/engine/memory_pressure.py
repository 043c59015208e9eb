"""Memory pressure: the KV memory follows what its container and the machine have left.

    short    less than 5 % of the limit is available, or tasks waited for memory in 10 % of the last 10 seconds
    ample    15 % and a step more are available, and tasks waited in less than 1 %, for half a minute without a break

Where memory is short the KV memory gets smaller by an eighth of its range, at most every 5 seconds. Where it is ample,
it gets as much larger, and the half minute begins again. Between the two nothing changes.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.engine.host_memory import host_memory
from quire.errors import HostMemoryError
from quire.plan.budget import format_bytes

logger = logging.getLogger(__name__)

_STALLED = re.compile(r"^some avg10=([0-9.]+)", re.MULTILINE)
_SHORT, _AMPLE = 0.05, 0.15  # shares of the limit that are available
_STALLS, _NO_STALLS = 10.0, 1.0  # per cent of the time
_STEPS = 8
_SMALLER_EVERY_S, _AMPLE_FOR_S = 5.0, 30.0
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Pressure:
    """Bytes that are `available` of the `limit` of the containers, or of the machine; and the per cent of the last 10
    seconds in which some task waited for memory."""

    available: int
    limit: int
    stalled: float


def read_pressure(root: Path = Path("/")) -> Pressure:
    """The pressure now. `root` is where the system's files start. Raises HostMemoryError if these do not tell."""
    path = root / "proc/pressure/memory"
    try:
        found = _STALLED.search(path.read_text())
    except OSError as error:
        found, why = None, str(error)
    else:
        why = "it has no line 'some avg10'"
    if found is None:
        raise HostMemoryError(
            f"the pressure of memory cannot be read from {path}: {why}.",
            fix="leave --kv-pressure out, or use a kernel with PSI (boot with psi=1) that the container shows.",
        )
    memory = host_memory(root)
    return Pressure(memory.available, memory.limit or memory.total, float(found[1]))


class PressureSizes:
    """Which size follows from the pressure, between `least` and `most` bytes. `read` reads it."""

    def __init__(
        self,
        least: int,
        most: int,
        read: Callable[[], Pressure] = read_pressure,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._least, self._read, self._seconds = least, read, seconds
        self.most = most
        """What it grows to: no more than was asked for last."""
        self._step = max(1, (most - least) // _STEPS)
        self._look_at = self._smaller_at = seconds()
        self._ample_since: float | None = None
        read()  # a system that does not tell is refused at the start

    @property
    def is_due(self) -> bool:
        """Whether it is time to look."""
        return self._seconds() >= self._look_at

    def next(self, now_bytes: int) -> int:
        """The size that should follow `now_bytes`; the same if nothing should change."""
        now = self._seconds()
        self._look_at = now + LOOK_EVERY_S
        try:
            found = self._read()
        except HostMemoryError as error:
            logger.warning("the KV memory stays as it is: %s", error)
            return now_bytes
        short = found.available < _SHORT * found.limit or found.stalled >= _STALLS
        ample = found.available > _AMPLE * found.limit + self._step and found.stalled < _NO_STALLS
        self._ample_since = (self._ample_since or now) if ample else None
        size = now_bytes
        if short and now >= self._smaller_at:
            self._smaller_at = now + _SMALLER_EVERY_S
            size = max(self._least, now_bytes - self._step)
        elif self._ample_since is not None and now - self._ample_since >= _AMPLE_FOR_S:
            self._ample_since = now
            size = min(self.most, now_bytes + self._step)
        if size != now_bytes:
            logger.info(
                "%s of %s are available, tasks waited for memory in %g %% of the time: %s of KV memory in place of %s",
                *(format_bytes(found.available), format_bytes(found.limit), found.stalled),
                *(format_bytes(size), format_bytes(now_bytes)),
            )
        return size
