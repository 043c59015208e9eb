"""FrameCopies: frames between device pools and the host pool, byte for byte.

The device stores a field by layer, `[layers, frames, entries]`; the host stores records by frame. A copy moves one
piece, the entries of a layer, for each frame, field and layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.memory.host_pool import HostPool
from quire.memory.hosted_pool import HostedPool
from quire.memory.pool import Pool
from quire.memory.record import HEADER_BYTES, Rows
from quire.spec.ids import Ids

Bytes = npt.NDArray[np.uint8]

_SMALL_PIECE = 8 * 2**10
"""Bytes. Long pieces are copied by numpy, which writes without reading the target first, and short ones by torch, whose
loop costs less per piece."""

_STAGE_BYTES = 32 * 2**20


class FrameCopies:
    """Copies between `pools[i]`, the device's frames of the group at index i, and the records of that group in `host`.
    Its methods are those of `Copies`. Calls let other threads run meanwhile. Two calls at once may share a frame only
    if both read it. Frame 0 is never copied. A call is fastest if frames that are neighbours on the device are also
    neighbours on the host."""

    def __init__(self, pools: Sequence[Pool], host: HostPool) -> None:
        self._pools = tuple(pools)
        self._host = host
        self._copies = [
            (HostedFrames if pool.device.type == "cpu" else StagedFrames)(pool, host.rows(group))
            if not isinstance(pool, HostedPool)
            else None  # its frames are the records
            for group, pool in enumerate(pools)
        ]
        for group, pool in enumerate(pools):
            assert host.format(group).payload_bytes == pool.layout.bytes_per_frame, "a host pool of other layouts"

    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for pool in self._pools for field in pool.layout.fields for layer in field.layers}))

    def bytes_of(self, group: int) -> int:
        return self._host.format(group).num_bytes

    def rows(self, group: int) -> Rows:
        return self._host.rows(group)

    def to_host(self, group: int, device_frames: Ids, host_frames: Ids) -> None:
        self._check(group, device_frames, host_frames)
        if (copies := self._copies[group]) is not None:
            copies.to_host(device_frames, host_frames)

    def to_device(self, group: int, device_frames: Ids, host_frames: Ids, layer: int | None = None) -> None:
        self._check(group, device_frames, host_frames)
        if (copies := self._copies[group]) is not None:
            copies.to_device(device_frames, host_frames, layer)

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


class HostedFrames:
    """Copies of one group whose device is the CPU. Its methods are those of `FrameCopies`."""

    def __init__(self, pool: Pool, rows: Rows) -> None:
        self._all: list[tuple[_Side, _Side]] = []  # on the device and on the host
        self._of_layer: dict[int, list[tuple[_Side, _Side]]] = {}
        for layers, offset, pieces in _fields(pool):
            num_layers, _, size = pieces.shape
            host = rows[:, offset : offset + num_layers * size].reshape(len(rows), num_layers, size)
            assert np.shares_memory(host, rows)
            self._all.append(_sides(pieces.numpy().transpose(1, 0, 2), host))
            for index, layer in enumerate(layers):
                self._of_layer.setdefault(layer, []).append(_sides(pieces.numpy()[index], host[:, index]))

    def to_host(self, device_frames: Ids, host_frames: Ids) -> None:
        runs = _runs(device_frames, host_frames)
        for device, host in self._all:
            _copy(device, host, runs)

    def to_device(self, device_frames: Ids, host_frames: Ids, layer: int | None) -> None:
        runs = _runs(host_frames, device_frames)
        for device, host in self._all if layer is None else self._of_layer.get(layer, []):
            _copy(host, device, runs)


def _fields(pool: Pool) -> Iterator[tuple[tuple[int, ...], int, Tensor]]:
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


def _runs(sources: Ids, targets: Ids) -> list[tuple[int, int, int]]:
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


class StagedFrames:
    """Copies of one group whose device is not the host. Its methods are those of `FrameCopies`.

    A batch of frames is gathered into (or scattered from) a buffer `[frames, bytes]` on the device. Each batch crosses
    in one asynchronous copy on a stream of its own, which first waits for the caller's stream. Copies overlap only if
    `rows` are pinned. Tests run the gathering on the CPU; the streams have not run on a GPU yet.
    """

    def __init__(self, pool: Pool, rows: Rows) -> None:
        self._device = pool.device
        self._fields = list(_fields(pool))
        size = HEADER_BYTES + pool.layout.bytes_per_frame
        self._rows = torch.from_numpy(rows)[:, :size]
        self._batch = max(1, _STAGE_BYTES // size)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def to_host(self, device_frames: Ids, host_frames: Ids) -> None:
        with self._on_stream():
            for device, host in self._batches(device_frames, host_frames):
                gathered = [
                    pieces.index_select(1, device).transpose(0, 1).reshape(len(host), -1)
                    for _, _, pieces in self._fields
                ]
                staged = torch.cat(gathered, dim=1)
                for index, frame in enumerate(host):
                    self._rows[frame, HEADER_BYTES:].copy_(staged[index], non_blocking=True)

    def to_device(self, device_frames: Ids, host_frames: Ids, layer: int | None) -> None:
        with self._on_stream():
            for device, host in self._batches(device_frames, host_frames):
                for start, pieces in self._wanted(layer):
                    size = pieces.shape[0] * pieces.shape[2]
                    staged = torch.empty((len(host), size), dtype=torch.uint8, device=self._device)
                    for index, frame in enumerate(host):
                        staged[index].copy_(self._rows[frame, start : start + size], non_blocking=True)
                    pieces.index_copy_(1, device, staged.view(len(host), pieces.shape[0], -1).transpose(0, 1))

    def _wanted(self, layer: int | None) -> Iterator[tuple[int, Tensor]]:
        """Offset in a record, and pieces `[layers, frames, bytes]`, of each field, for all layers or one."""
        for layers, offset, pieces in self._fields:
            if layer is None:
                yield offset, pieces
            elif layer in layers:
                index = layers.index(layer)
                yield offset + index * pieces.shape[2], pieces[index : index + 1]

    def _batches(self, device_frames: Ids, host_frames: Ids) -> Iterator[tuple[Tensor, list[int]]]:
        for start in range(0, len(host_frames), self._batch):
            chosen = slice(start, start + self._batch)
            device = torch.from_numpy(np.asarray(device_frames[chosen], dtype=np.int64)).to(self._device)
            yield device, host_frames[chosen].tolist()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # Also after an error: rows must not be reused while a queued copy writes them.
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            done.synchronize()
