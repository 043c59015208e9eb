"""Upload: host arrays on their way to a device, without a wait: many of them in one copy from pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNED = 16  # bytes, so that a kernel may load several elements of an array at once


class Upload:
    """The arrays of one step on the way to `device`. `sent` bytes of them went in `num_copies` copies.

    `place` writes an array into pinned memory, and returns the tensor that has it after `send`. Nothing may read it
    before. If the device is the CPU, nothing is copied, and tensors share the memory of their arrays. `num_bytes` is
    the room for arrays in one copy.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device = device
        self.sent = 0
        self.num_copies = 0
        self._room = num_bytes
        self._pinned: Tensor | None = None
        self._arrived: Tensor | None = None
        self._used = 0

    def place(self, array: npt.NDArray[Any]) -> Tensor:
        """The tensor of an array, of its shape and element type."""
        if self.device.type == "cpu":
            return torch.from_numpy(array)
        found = torch.from_numpy(np.ascontiguousarray(array))
        start, stop = self._used, self._used + found.nbytes
        if self._pinned is None or stop > len(self._pinned):
            self.send()
            room = self._room = max(self._room, found.nbytes)
            self._pinned = torch.empty(room, dtype=torch.uint8, pin_memory=True)
            self._arrived = torch.empty(room, dtype=torch.uint8, device=self.device)
            start, stop = 0, found.nbytes
        assert self._arrived is not None
        self._pinned[start:stop].view(found.dtype).copy_(found.view(-1))
        self._used = -(-stop // _ALIGNED) * _ALIGNED
        return self._arrived[start:stop].view(found.dtype).view(found.shape)

    def send(self) -> None:
        """Copy what was placed, behind the work that the device has."""
        if self._used and self._pinned is not None and self._arrived is not None:
            count = min(self._used, len(self._pinned))
            # Torch keeps the pinned memory, which nothing holds from here on, until this copy has read it.
            self._arrived[:count].copy_(self._pinned[:count], non_blocking=True)
            self.sent += count
            self.num_copies += 1
        self._pinned = self._arrived = None
        self._used = 0

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Arrays that this thread gives to `to_device` inside the block are placed, and sent at its end."""
        before, _collecting.upload = _collecting.upload, self
        try:
            yield
        finally:
            _collecting.upload = before
            self.send()  # also after an error: what was placed may be kept for the next step


class _Collecting(threading.local):
    upload: Upload | None = None


_collecting = _Collecting()


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array on `device`, where it arrives without a wait; it shares memory with the array if that is the CPU.
    Inside `Upload.collecting` it arrives at the end of the block."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    if (upload := _collecting.upload) is not None:
        return upload.place(array)
    upload = Upload(device, array.nbytes)
    found = upload.place(array)
    upload.send()
    return found
