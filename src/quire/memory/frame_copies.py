"""FrameCopies: frames between device pools and the host pool, byte for byte.

The device stores a field by layer, `[layers, frames, entries]`; the host stores records by frame. A copy moves one
piece, the entries of a layer, for each frame, field and layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.memory.frame_staging import StagedFrames
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.memory.record import HEADER_BYTES, Rows
from quire.spec.ids import Ids

Bytes = npt.NDArray[np.uint8]

_SMALL_PIECE = 8 * 2**10
"""Bytes. Longer pieces go by numpy, whose copy writes without reading the target first; shorter ones by torch, whose
loop costs less for each piece."""


class FrameCopies:
    """Copies between `pools[i]`, the device's frames of the group at index i, and the records of that group in `host`.

    Calls return when the bytes have arrived, and let other threads run meanwhile. Two calls at once may share a frame
    only if both read it. Frame 0 is never copied. Frames may come in any order; a call is fastest where neighbours on
    the device are neighbours on the host.
    """

    def __init__(self, pools: Sequence[Pool], host: HostPool) -> None:
        self._pools = tuple(pools)
        self._host = host
        self._copies = [
            (HostedFrames if pool.device.type == "cpu" else StagedFrames)(pool, host.rows(group))
            for group, pool in enumerate(pools)
        ]
        for group, pool in enumerate(pools):
            assert host.format(group).payload_bytes == pool.layout.bytes_per_frame, "a host pool of other layouts"

    def layers(self) -> tuple[int, ...]:
        """The ordinals of all layers that have fields, ascending, as a forward pass needs them."""
        return tuple(sorted({layer for pool in self._pools for field in pool.layout.fields for layer in field.layers}))

    def bytes_of(self, group: int) -> int:
        """Bytes of one record."""
        return self._host.format(group).num_bytes

    def rows(self, group: int) -> Rows:
        """The host's records, uint8 `[frames + 1, stride]`."""
        return self._host.rows(group)

    def to_host(self, group: int, device_frames: Ids, host_frames: Ids) -> None:
        """Copy `device_frames[i]` into the record of `host_frames[i]`, whose header is then wrong until `seal`."""
        self._check(group, device_frames, host_frames)
        self._copies[group].to_host(device_frames, host_frames)

    def to_device(self, group: int, device_frames: Ids, host_frames: Ids, layer: int | None = None) -> None:
        """Copy the record of `host_frames[i]` into `device_frames[i]`: all of it, or one layer's part."""
        self._check(group, device_frames, host_frames)
        self._copies[group].to_device(device_frames, host_frames, layer)

    def seal(self, group: int, host_frames: Ids, keys: Sequence[bytes]) -> None:
        """See `RecordFormat.seal`."""
        self._host.format(group).seal(self._host.rows(group), host_frames, keys)

    def defects(self, group: int, host_frames: Ids, keys: Sequence[bytes]) -> list[str]:
        """See `RecordFormat.defects`."""
        return self._host.format(group).defects(self._host.rows(group), host_frames, keys)

    def _check(self, group: int, device_frames: Ids, host_frames: Ids) -> None:
        assert len(device_frames) == len(host_frames), "a frame for each frame"
        most = (self._pools[group].num_frames, len(self._host.rows(group)) - 1)
        for frames, last in zip((device_frames, host_frames), most, strict=True):
            assert not len(frames) or (frames.min() >= 1 and frames.max() <= last), "a frame outside its pool"


class _Side(NamedTuple):
    """One side of a field, for all layers or one: `[frames + 1, layers, bytes of a piece]` or `[frames + 1, bytes of a
    piece]`, and the same memory as a tensor of bytes or words."""

    pieces: Bytes
    words: Tensor


class HostedFrames:
    """Copies of one group whose device is the CPU."""

    def __init__(self, pool: Pool, rows: Rows) -> None:
        self._all: list[tuple[_Side, _Side]] = []  # on the device and on the host
        self._of_layer: dict[int, list[tuple[_Side, _Side]]] = {}
        offset = HEADER_BYTES
        for field, tensor in pool.tensors:
            num_layers, num_frames = tensor.shape[:2]
            pieces = tensor.view(torch.uint8).view(num_layers, num_frames, -1)
            piece = pieces.shape[2]
            host = rows[:, offset : offset + num_layers * piece].reshape(len(rows), num_layers, piece)
            assert np.shares_memory(host, rows)
            self._all.append(_sides(pieces.numpy().transpose(1, 0, 2), host))
            for index, layer in enumerate(field.layers):
                self._of_layer.setdefault(layer, []).append(_sides(pieces.numpy()[index], host[:, index]))
            offset += num_layers * piece

    def to_host(self, device_frames: Ids, host_frames: Ids) -> None:
        """As `FrameCopies.to_host`."""
        runs = _runs(device_frames, host_frames)
        for device, host in self._all:
            _copy(device, host, runs)

    def to_device(self, device_frames: Ids, host_frames: Ids, layer: int | None) -> None:
        """As `FrameCopies.to_device`."""
        runs = _runs(host_frames, device_frames)
        for device, host in self._all if layer is None else self._of_layer.get(layer, []):
            _copy(host, device, runs)


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
