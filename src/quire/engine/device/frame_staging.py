"""FrameStaging: frames of a GPU's pools and records of host memory, copied on a stream of its own beside the steps.

    compute   | step N-1 | mark | step N .............. | waits for `copied` | step N+1
    copies              wait for mark | frames ......... | copied
    host                                                  a mover's thread waits for `copied`, no step does

A load overwrites frames that earlier steps may have read, and a save reads frames that they wrote. What the host did
not wait for, such as drafts that were moved, lies before the mark. Frames of a step in flight are in no transfer.

Has not run on a GPU: tests run it on a device in Python, which has streams, events and the order of work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from quire.kernels.moves import TORCH, Moves, Pieces
from quire.memory.frame_copies import runs_of
from quire.memory.pinned import slice_rows
from quire.memory.pool import Pool
from quire.memory.record import HEADER_BYTES, Records
from quire.spec.ids import Ids
from quire.upload import to_device

_STAGE_BYTES = 32 * 2**20


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
    """A `QueuedCopy`, and the event at its end."""

    def __init__(self, copied: torch.cuda.Event, compute: ComputeStream) -> None:
        self._copied = copied
        self._compute = compute
        self._is_followed = False

    def order(self) -> None:
        """See `QueuedCopy`."""
        if not self._is_followed:
            self._compute.stream.wait_event(self._copied)
            self._is_followed = True

    def wait(self) -> None:
        """See `QueuedCopy`."""
        self._copied.synchronize()


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
    """

    def __init__(self, pool: Pool, rows: Records, staging: FrameStaging) -> None:
        self._device = pool.device
        self._staging = staging
        self._moves = staging.compute.moves
        self._pieces = Pieces.of([(HEADER_BYTES, pool.rows[None, :, None])], rows.shape[1])
        self._rows = torch.from_numpy(rows).view(self._pieces.word)
        self._batch = max(1, _STAGE_BYTES // rows.shape[1])
        self._slice = slice_rows(rows.shape[1])

    def to_host(self, device_frames: Ids, host_frames: Ids) -> None:
        """Returns when the copy is complete."""
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self._staging.copying(copied):
            for device, runs, staged in self._batches(device_frames, host_frames):
                self._moves.gather(self._pieces, device, staged)
                for at, first, count in runs:
                    self._rows[first : first + count].copy_(staged[at : at + count], non_blocking=True)
        copied.synchronize()

    def to_device(self, device_frames: Ids, host_frames: Ids) -> StagedCopy:
        """Returns when the copy is queued."""
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self._staging.copying(copied):
            for device, runs, staged in self._batches(device_frames, host_frames):
                for at, first, count in runs:
                    staged[at : at + count].copy_(self._rows[first : first + count], non_blocking=True)
                self._moves.scatter(self._pieces, device, staged)
        return StagedCopy(copied, self._staging.compute)

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
