"""FrameStaging: frames of a GPU's pools and records of host memory, copied on a stream of its own beside the steps.

    compute   | step N-1 | mark | step N .............. | layers 0-7 | waits | layers 8-15 | waits | ... of step N+1
    copies              wait for mark | layers 0-7 | copied | layers 8-15 | copied | ...
    host                                                  a mover's thread waits for the last `copied`, no step does

A load overwrites frames that earlier steps may have read, and a save reads frames that they wrote. What the host did
not wait for, such as drafts that were moved, lies before the mark. Frames of a step in flight are in no transfer.

Has not run on a GPU: tests run it on a device in Python, which has streams, events and the order of work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from quire.kernels.moves import TORCH, Moves, Pieces
from quire.memory.frame_copies import fields_of, runs_of
from quire.memory.pinned import slice_rows
from quire.memory.pool import Pool
from quire.memory.record import Records
from quire.spec.ids import Ids
from quire.upload import to_device

_STAGE_BYTES = 32 * 2**20
_LEAST_COPY = 128 * 2**10
"""Bytes from which a copy on its own costs little more than as a part of a larger one."""
_MOST_PARTS = 8


class ComputeStream:
    """The stream on which the steps of an engine run: that of the thread which makes this. Steps run on it from any
    thread. `moves` is what copies on the device."""

    def __init__(self, device: torch.device, moves: Moves = TORCH) -> None:
        self.device = device
        self.moves = moves
        self.stream = torch.cuda.current_stream(device)
        self.marked: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Copies that begin from now on follow what was launched until now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        self.marked = event


class StagedCopy:
    """A `QueuedCopy` in parts, one after the other: their layers, and the event at the end of each."""

    def __init__(self, parts: Sequence[tuple[Collection[int], torch.cuda.Event]], compute: ComputeStream) -> None:
        self._events = [event for _, event in parts]
        self._part_of = {layer: at for at, (layers, _) in enumerate(parts) for layer in layers}
        self._compute = compute
        self._followed = 0  # parts

    def order(self, layer: int) -> None:
        """See `QueuedCopy`."""
        part = self._part_of.get(layer, -1)
        if part >= self._followed:
            self._compute.stream.wait_event(self._events[part])
            self._followed = part + 1

    def wait(self) -> None:
        """See `QueuedCopy`."""
        self._events[-1].synchronize()


class FrameStaging:
    """The stream of all copies of an engine, beside the steps on `compute`."""

    def __init__(self, compute: ComputeStream) -> None:
        self.compute = compute
        self._stream = torch.cuda.Stream(compute.device)  # type: ignore[no-untyped-call]

    def frames(self, pool: Pool, rows: Records) -> StagedFrames:
        """Copies between `pool` and `rows`, which must be pinned."""
        return StagedFrames(pool, rows, self)

    @contextmanager
    def copying(self, copied: torch.cuda.Event) -> Iterator[None]:
        """Work inside the block is on the stream of copies, behind the mark; `copied` is recorded at its end. After an
        error it is waited for: rows must not be reused while a queued copy uses them."""
        if self.compute.marked is not None:
            self._stream.wait_event(self.compute.marked)
        try:
            with torch.cuda.stream(self._stream):
                yield
        except BaseException:
            copied.record(self._stream)
            copied.synchronize()
            raise
        copied.record(self._stream)


class StagedFrames:
    """Copies of one group. Its methods are those of `FrameCopies`.

    A batch of frames is gathered into, or scattered from, a buffer of whole records on the device. Records that are
    neighbours on the host cross in one copy, headers and gaps included, but for those of two slices of pinned memory.
    A load comes in parts, some layers each, if the bytes of a record's field in a part are worth a copy of their own.
    """

    def __init__(self, pool: Pool, rows: Records, staging: FrameStaging) -> None:
        self._device = pool.device
        self._staging = staging
        self._moves = staging.compute.moves
        self._pieces = Pieces.of([(start, pieces) for _, start, pieces in fields_of(pool)], rows.shape[1])
        self._rows = torch.from_numpy(rows).view(self._pieces.word)
        self._batch = max(1, _STAGE_BYTES // rows.shape[1])
        self._slice = slice_rows(rows.shape[1])
        self._parts = self._cut([layers for layers, _, _ in fields_of(pool)])

    def to_host(self, device_frames: Ids, host_frames: Ids) -> None:
        """Returns when the copy is complete."""
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self._staging.copying(copied):
            for device, runs, staged in self._batches(device_frames, host_frames):
                self._moves.gather(self._pieces, device, staged)
                for at, first, count in runs:
                    self._rows[first : first + count].copy_(staged[at : at + count], non_blocking=True)
        copied.synchronize()

    def to_device(self, device_frames: Ids, host_frames: Ids, layer: int | None) -> StagedCopy:
        """Returns when the copy is queued."""
        assert layer is None, "all layers are loaded by one call"
        queued: list[tuple[Collection[int], torch.cuda.Event]] = []
        for layers, pieces in self._parts:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            with self._staging.copying(copied):
                for device, runs, staged in self._batches(device_frames, host_frames):
                    if len(self._parts) == 1:
                        for at, first, count in runs:
                            staged[at : at + count].copy_(self._rows[first : first + count], non_blocking=True)
                    else:
                        self._copy_fields(staged, runs, pieces)
                    self._moves.scatter(pieces, device, staged)
            queued.append((layers, copied))
        return StagedCopy(queued, self._staging.compute)

    def _copy_fields(self, staged: Tensor, runs: Sequence[tuple[int, int, int]], pieces: Pieces) -> None:
        """A copy for each record and field, whose layers are neighbours."""
        for at, first, count in runs:
            for number in range(count):
                into, record = staged[at + number], self._rows[first + number]
                for start, part in pieces.parts:
                    stop = start + part.shape[0] * part.shape[2]
                    into[start:stop].copy_(record[start:stop], non_blocking=True)

    def _cut(self, layers: Sequence[tuple[int, ...]]) -> list[tuple[Collection[int], Pieces]]:
        """The parts of a load: some layers, one after the other, and of each field what they have. `layers` are those
        of each field, ascending."""
        known, word = sorted({layer for some in layers for layer in some}), self._rows.element_size()
        sizes = [part.shape[0] * part.shape[2] * word for _, part in self._pieces.parts]
        count = max(1, min(_MOST_PARTS, len(known), *(size // _LEAST_COPY for size in sizes)))
        parts: list[tuple[Collection[int], Pieces]] = []
        for some in np.array_split(np.array(known), count):
            own: list[tuple[int, Tensor]] = []
            for (start, part), of_field in zip(self._pieces.parts, layers, strict=True):
                low, high = np.searchsorted(of_field, [some[0], some[-1] + 1]).tolist()
                if low < high:
                    own.append((start + low * part.shape[2], part[low:high]))
            parts.append((some.tolist(), Pieces(own, self._pieces.record_words)))
        return parts

    def _batches(
        self, device_frames: Ids, host_frames: Ids
    ) -> Iterator[tuple[Tensor, list[tuple[int, int, int]], Tensor]]:
        """Frames in the order of their records: their index on the device, int64; runs (place, first record, count) of
        neighbours; and a buffer of their records."""
        order = np.argsort(host_frames, kind="stable")
        for start in range(0, len(order), self._batch):
            some = order[start : start + self._batch]
            host = host_frames[some]
            staged = torch.empty((len(some), self._rows.shape[1]), dtype=self._rows.dtype, device=self._device)
            device = to_device(device_frames[some].astype(np.int64), self._device)
            yield device, list(self._within_slices(runs_of(np.arange(len(some), dtype=np.int32), host))), staged

    def _within_slices(self, runs: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
        for at, first, left in runs:
            while left:
                count = min(left, self._slice - first % self._slice)
                yield at, first, count
                at, first, left = at + count, first + count, left - count
