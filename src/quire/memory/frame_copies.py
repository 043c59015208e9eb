"""FrameCopies: frames between device pools and the host pool, byte for byte.

The device stores a field by layer, `[layers, frames, entries]`; the host stores records by frame. A copy moves one
piece, the entries of a layer, for each frame, field and layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.memory.record import HEADER_BYTES, QueuedCopy, Records
from quire.spec.ids import Ids

Bytes = npt.NDArray[np.uint8]

_SMALL_PIECE = 8 * 2**10
"""Bytes. Long pieces are copied by numpy, which writes without reading the target first, and short ones by torch, whose
loop costs less per piece."""


class GroupCopies(Protocol):
    """Copies of one group. Its methods are those of `FrameCopies`."""

    def to_host(self, device_frames: Ids, host_frames: Ids) -> None: ...

    def to_device(self, device_frames: Ids, host_frames: Ids, layer: int | None) -> QueuedCopy | None: ...


Frames = Callable[[Pool, Records], GroupCopies]


class FrameCopies:
    """Copies between `pools[i]`, the device's frames of the group at index i, and the records of that group in `host`.
    Its methods are those of `Copies`. Calls let other threads run meanwhile. Two calls at once may share a frame only
    if both read it. Frame 0 is never copied. A call is fastest if frames that are neighbours on the device are also
    neighbours on the host. `frames` makes what copies the frames of a pool and records; by default the device is the
    CPU. `queues`: it copies to the device on a stream of its own."""

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

    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for pool in self._pools for field in pool.layout.fields for layer in field.layers}))

    def bytes_of(self, group: int) -> int:
        return self._host.format(group).num_bytes

    def rows(self, group: int) -> Records:
        return self._host.rows(group)

    def to_host(self, group: int, device_frames: Ids, host_frames: Ids) -> None:
        self._check(group, device_frames, host_frames)
        if (copies := self._copies[group]) is not None:
            copies.to_host(device_frames, host_frames)

    def to_device(
        self, group: int, device_frames: Ids, host_frames: Ids, layer: int | None = None
    ) -> QueuedCopy | None:
        self._check(group, device_frames, host_frames)
        copies = self._copies[group]
        return None if copies is None else copies.to_device(device_frames, host_frames, layer)

    def seal(self, group: int, host_frames: Ids, keys: Sequence[bytes]) -> None:
        self._host.format(group).seal(self._host.rows(group), host_frames, keys)

    def defects(self, group: int, host_frames: Ids, keys: Sequence[bytes]) -> list[str]:
        return self._host.format(group).defects(self._host.rows(group), host_frames, keys)

    def _check(self, group: int, device_frames: Ids, host_frames: Ids) -> None:
        assert len(device_frames) == len(host_frames), "a frame for each frame"
        pool, rows = self._pools[group], self._host.rows(group)
        for frames, last in ((device_frames, pool.num_frames), (host_frames, len(rows) - 1)):
            assert not len(frames) or (frames.min() >= 1 and frames.max() <= last), "a frame outside its pool"


class _Side(NamedTuple):
    """One side of a field, for all layers or one: `[frames + 1, layers, bytes of a piece]` or `[frames + 1, bytes of a
    piece]`, and the same memory as a tensor of bytes or words."""

    pieces: Bytes
    words: Tensor


class CpuFrames:
    """Copies of one group whose device is the CPU. Its methods are those of `FrameCopies`."""

    def __init__(self, pool: Pool, rows: Records) -> None:
        self._all: list[tuple[_Side, _Side]] = []  # on the device and on the host
        self._of_layer: dict[int, list[tuple[_Side, _Side]]] = {}
        for layers, offset, pieces in fields_of(pool):
            num_layers, _, size = pieces.shape
            host = rows[:, offset : offset + num_layers * size].reshape(len(rows), num_layers, size)
            assert np.shares_memory(host, rows)
            self._all.append(_sides(pieces.numpy().transpose(1, 0, 2), host))
            for index, layer in enumerate(layers):
                self._of_layer.setdefault(layer, []).append(_sides(pieces.numpy()[index], host[:, index]))

    def to_host(self, device_frames: Ids, host_frames: Ids) -> None:
        runs = runs_of(device_frames, host_frames)
        for device, host in self._all:
            _copy(device, host, runs)

    def to_device(self, device_frames: Ids, host_frames: Ids, layer: int | None) -> None:
        runs = runs_of(host_frames, device_frames)
        for device, host in self._all if layer is None else self._of_layer.get(layer, []):
            _copy(host, device, runs)


def fields_of(pool: Pool) -> Iterator[tuple[tuple[int, ...], int, Tensor]]:
    """Per field: its layers, its offset in a record, and its pieces, uint8 `[layers, frames, bytes]`, a view."""
    offset = HEADER_BYTES
    for field, tensor in pool.tensors:
        pieces = tensor.view(torch.uint8).view(*tensor.shape[:2], -1)
        yield field.layers, offset, pieces
        offset += pieces.shape[0] * pieces.shape[2]


def _sides(device: Bytes, host: Bytes) -> tuple[_Side, _Side]:
    both = (device, host)
    wide = all(s.shape[-1] % 8 == 0 and s.ctypes.data % 8 == 0 and s.strides[0] % 8 == 0 for s in both)
    on_device, on_host = (_Side(s, torch.from_numpy(s.view(np.int64) if wide else s)) for s in both)
    return on_device, on_host


def _copy(source: _Side, target: _Side, runs: Sequence[tuple[int, int, int]]) -> None:
    is_small = source.pieces.shape[-1] < _SMALL_PIECE
    for first, start, count in runs:
        if count == 1:
            target.pieces[start] = source.pieces[first]
        elif is_small:
            target.words[start : start + count].copy_(source.words[first : first + count])
        else:
            target.pieces[start : start + count] = source.pieces[first : first + count]


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
