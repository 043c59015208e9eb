"""Workspace: scratch tensors kept between calls, because fresh ones of a CPU cost a page fault per 4 KiB."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class Workspace(threading.local):
    """Named scratch tensors, a set per thread. The tensor from `take` is overwritten by the next `take` of its name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
        """An uninitialised tensor of `shape`; a new one on a GPU, whose allocator keeps memory itself, and whose graphs
        would go on to use what was replaced by a larger one."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        key = (name, dtype, device)
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # so that later calls outside inference mode may write it
                buffer = torch.empty(max(size, 1 << 16), dtype=dtype, device=device)
            self._buffers[key] = buffer
        return buffer[:size].view(shape)
