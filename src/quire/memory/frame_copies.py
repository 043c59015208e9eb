"""FrameCopies: frames between device pools and the host pool, byte for byte. On both sides a frame is one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.memory.record import HEADER_BYTES, QueuedCopy, Records
from quire.spec.ids import Ids


class GroupCopies(Protocol):
    """Copies of one group. Its methods are those of `FrameCopies`."""

    def to_host(self, device_frames: Ids, host_frames: Ids) -> None: ...

    def to_device(self, device_frames: Ids, host_frames: Ids) -> QueuedCopy | None: ...


Frames = Callable[[Pool, Records], GroupCopies]
CopyRows = Callable[[Records, Records, Ids, Ids], None]  # from rows of one array, to rows of another


class FrameCopies:
    """Copies between `pools[i]`, the device's frames of the group at index i, and the records of that group in `host`.
    Its methods are those of `Copies`. Calls let other threads run meanwhile. Two calls at once may share a frame only
    if both read it. Frame 0 is never copied. A call is fastest if frames that are neighbours on the device are also
    neighbours on the host. `frames` makes what copies the frames of a pool and records; by default the device is the
    CPU, and nothing is compiled. `queues`: it copies to the device on a stream of its own."""

    def __init__(
        self, pools: Sequence[Pool], host: HostPool, frames: Frames | None = None, *, queues: bool = False
    ) -> None:
        self._pools = tuple(pools)
        self._host = host
        self.queues = queues
        of = frames or CpuFrames
        self._copies = [None if pool.on_host else of(pool, host.rows(group)) for group, pool in enumerate(pools)]
        for group, pool in enumerate(pools):
            assert host.format(group).payload_bytes == pool.layout.bytes_per_frame, "a host pool of other layouts"

    def bytes_of(self, group: int) -> int:
        return self._host.format(group).num_bytes

    def rows(self, group: int) -> Records:
        return self._host.rows(group)

    def to_host(self, group: int, device_frames: Ids, host_frames: Ids) -> None:
        self._check(group, device_frames, host_frames)
        if (copies := self._copies[group]) is not None:
            copies.to_host(device_frames, host_frames)

    def to_device(self, group: int, device_frames: Ids, host_frames: Ids) -> QueuedCopy | None:
        self._check(group, device_frames, host_frames)
        copies = self._copies[group]
        return None if copies is None else copies.to_device(device_frames, host_frames)

    def seal(self, group: int, host_frames: Ids, keys: Sequence[bytes]) -> None:
        self._host.format(group).seal(self._host.rows(group), host_frames, keys)

    def defects(self, group: int, host_frames: Ids, keys: Sequence[bytes]) -> list[str]:
        return self._host.format(group).defects(self._host.rows(group), host_frames, keys)

    def _check(self, group: int, device_frames: Ids, host_frames: Ids) -> None:
        assert len(device_frames) == len(host_frames), "a frame for each frame"
        for frames, last in ((device_frames, self._pools[group].num_frames), (host_frames, len(self.rows(group)) - 1)):
            assert not len(frames) or (frames.min() >= 1 and frames.max() <= last), "a frame outside its pool"


class CpuFrames:
    """Copies of one group whose device is the CPU. Its methods are those of `FrameCopies`."""

    def __init__(self, pool: Pool, rows: Records, copy: CopyRows | None = None) -> None:
        self._device: Records = pool.rows.numpy()
        self._host = rows[:, HEADER_BYTES : HEADER_BYTES + pool.layout.bytes_per_frame]
        self._copy = copy or copy_runs

    def to_host(self, device_frames: Ids, host_frames: Ids) -> None:
        self._copy(self._device, self._host, device_frames, host_frames)

    def to_device(self, device_frames: Ids, host_frames: Ids) -> None:
        self._copy(self._host, self._device, host_frames, device_frames)


def copy_runs(source: Records, target: Records, sources: Ids, targets: Ids) -> None:
    """Copy rows `sources` of an array to rows `targets` of another, with a call for each run."""
    for first, start, count in runs_of(sources, targets):
        target[start : start + count] = source[first : first + count]


def runs_of(sources: Ids, targets: Ids) -> list[tuple[int, int, int]]:
    """`(first source, first target, count)` of runs that ascend by one on both sides."""
    if not len(sources):
        return []
    source, target = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
    breaks = _breaks(source, target)
    if len(breaks):
        order = np.argsort(target, kind="stable")
        source, target = source[order], target[order]
        breaks = _breaks(source, target)
    starts = np.concatenate(([0], breaks))
    counts = np.diff(starts, append=len(source))
    return list(zip(source[starts].tolist(), target[starts].tolist(), counts.tolist(), strict=True))


def _breaks(source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    return found
