"""StagedFrames: frames between an accelerator and the host, gathered on the accelerator, with one copy for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from quire.memory.pool import Pool
from quire.memory.record import HEADER_BYTES, Rows
from quire.spec.ids import Ids

_STAGE_BYTES = 32 * 2**20


class StagedFrames:
    """Copies of one group whose device is not the host.

    A batch of frames is gathered into (or scattered from) a buffer `[frames, bytes]` on the device. Each frame crosses
    in one asynchronous copy on its own stream, which first waits for the calling thread's stream. A call returns when
    its last copy has arrived. Copies overlap only if `rows` are pinned.

    The gathering is tested on the CPU. The streams have not been run on a GPU yet.
    """

    def __init__(self, pool: Pool, rows: Rows) -> None:
        self._device = pool.device
        # layers, offset in a record, [layers, frames, piece]
        self._fields: list[tuple[tuple[int, ...], int, Tensor]] = []
        offset = HEADER_BYTES
        for field, tensor in pool.tensors:
            pieces = tensor.view(torch.uint8).view(tensor.shape[0], tensor.shape[1], -1)
            self._fields.append((field.layers, offset, pieces))
            offset += pieces.shape[0] * pieces.shape[2]
        self._rows = torch.from_numpy(rows)[:, :offset]
        self._batch = max(1, _STAGE_BYTES // offset)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def to_host(self, device_frames: Ids, host_frames: Ids) -> None:
        """As `FrameCopies.to_host`."""
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
        """As `FrameCopies.to_device`."""
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
        """Runs the body on the own stream, behind the caller's, and waits for it at the end."""
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
