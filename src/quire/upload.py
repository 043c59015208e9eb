"""Upload: host arrays on their way to a device, without a wait: many of them in one copy from pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNED = 16  # bytes, so that a kernel may load several elements of an array at once


class Upload:
    """Arrays of steps on the way to `device`. `sent` bytes of them went in `num_copies` copies.

    `place` writes an array into pinned memory, and returns the tensor that has it after `send`. Nothing may read it
    before. If the device is the CPU, nothing is copied, and tensors share the memory of their arrays. `num_bytes` is
    the room for arrays in one copy, which grows to twice what a block has sent. In a block of `with`, arrays that this
    thread gives to `to_device` are placed, and sent at its end.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device = device
        self.sent = 0
        self.num_copies = 0
        self._room = num_bytes
        self._pinned: Tensor | None = None
        self._arrived: Tensor | None = None
        self._used = 0
        self._before: _Collector | None = None
        self._sent_before = 0

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

    def __enter__(self) -> Upload:
        self._before, _collecting.upload = _collecting.upload, self
        self._sent_before = self.sent
        return self

    def __exit__(self, *_: object) -> None:
        _collecting.upload = self._before
        self.send()  # also after an error: what was placed may be kept for the next step
        self._room = max(self._room, 2 * (self.sent - self._sent_before))


class FixedUpload:
    """Arrays that each time have the same types and shapes, at the same addresses on `device`: what a CUDA graph reads.

    They are like those that `fill` sends. After a block of `collecting`, `packed` has their bytes, and `take` copies
    the tensor of these (`to_device`) to their addresses, behind the work that the device has. `tensors` are there.
    """

    def __init__(self, device: torch.device, fill: Callable[[], object]) -> None:
        measuring = _Measuring(device)
        with _collected_by(measuring):
            fill()
        self._kinds = measuring.kinds
        self.packed: npt.NDArray[np.uint8] = np.zeros(max(measuring.used, _ALIGNED), dtype=np.uint8)
        self._there = torch.zeros(len(self.packed), dtype=torch.uint8, device=device)
        self.tensors = [
            self._there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in measuring.placed
        ]
        self._starts = [start for start, _ in measuring.placed]
        self._placed = 0

    def place(self, array: npt.NDArray[Any]) -> Tensor:
        """As `Upload.place`. Raises OtherShapes if the array is not like that of the first time."""
        at, kind = self._placed, (array.dtype, array.shape)
        if at == len(self._kinds) or kind != self._kinds[at]:
            raise OtherShapes(f"array {at} is {kind[0]} {list(kind[1])}")
        start = self._starts[at]
        self.packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._placed += 1
        return self.tensors[at]

    def take(self, sent: Tensor) -> None:
        """See this class."""
        self._there.copy_(sent)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """As a block of `Upload`. Raises OtherShapes if arrays are missing."""
        self._placed = 0
        with _collected_by(self):
            yield
        if self._placed != len(self._kinds):
            raise OtherShapes(f"{self._placed} arrays, of {len(self._kinds)}")


class OtherShapes(Exception):
    """Arrays are not like those that were promised."""


class _Measuring:
    """Where arrays would be, and tensors like them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.used = 0
        self.kinds: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
        self.placed: list[tuple[int, Tensor]] = []

    def place(self, array: npt.NDArray[Any]) -> Tensor:
        like = torch.from_numpy(np.zeros(array.shape, dtype=array.dtype))
        self.kinds.append((array.dtype, array.shape))
        self.placed.append((self.used, like))
        self.used = -(-(self.used + like.nbytes) // _ALIGNED) * _ALIGNED
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)


class _Refusing:
    def place(self, array: npt.NDArray[Any]) -> Tensor:
        raise OtherShapes(f"an array of the host, {array.dtype} {list(array.shape)}, where there can be none")


def refusing_arrays() -> AbstractContextManager[None]:
    """Arrays that this thread sends inside the block raise OtherShapes: a CUDA graph would keep their values."""
    return _collected_by(_Refusing())


_Collector = Upload | FixedUpload | _Measuring | _Refusing


@contextmanager
def _collected_by(upload: _Collector) -> Iterator[None]:
    before, _collecting.upload = _collecting.upload, upload
    try:
        yield
    finally:
        _collecting.upload = before


class _Collecting(threading.local):
    upload: _Collector | None = None


_collecting = _Collecting()


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array on `device`, where it arrives without a wait; it shares memory with the array if that is the CPU.
    In a block of `Upload` it arrives at the end of the block."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    if (upload := _collecting.upload) is not None:
        return upload.place(array)
    upload = Upload(device, array.nbytes)
    found = upload.place(array)
    upload.send()
    return found
