"""Backing: the memory of frames, and how much of it the system provides.

    Backing         all of it, for as long as the tensor lives: memory of a GPU, and small or foreign memory of the host
    MappedBacking   the first bytes, as many as were asked for: address space of the host, whose end can be given back

`CudaBacking` (`quire.engine.device.cuda_memory`) is memory of a GPU whose end can be given back.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.errors import HostMemoryError, PlanError, RefusedCombination
from quire.memory.host_pool import populate, reserve, touch

_LARGE = 4 * 2**20
"""Size in bytes from which memory is mapped in any case, in huge pages."""

_PIECE = 16 * 2**20
_SYSTEM_PAGE = 4096
_HUGE_PAGE = 2 * 2**20
_MANY = 128 * _HUGE_PAGE  # from here on a huge page is less than one per cent


class Backing:
    """`tensor` is uint8, and has memory for the first `num_bytes`. In this class its size is fixed."""

    can_shrink = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.num_bytes = len(tensor)

    def populate(self) -> Iterator[None]:
        """Make the system provide host memory piece by piece, also while it is in use."""
        yield from ()

    def resize(self, num_bytes: int) -> None:
        """Have the first `num_bytes`, and give the rest back to the system. Bytes that come again are zero. On a host
        they are provided when they are written, or by `populate`. Nothing may use the rest. Raises RefusedCombination,
        and PlanError, with nothing changed, if a GPU has too little."""
        fix = "leave the size as it is, or start with --kv-memory 1GiB..4GiB, and on a GPU with --elastic-gpu."
        raise RefusedCombination(self.why_fixed, fix=fix)

    @property
    def why_fixed(self) -> str:
        """Why the size cannot change; "" if it can."""
        device = self.tensor.device
        return f"{'small' if device.type == 'cpu' else 'KV'} pools on {device} have a fixed size."


class MappedBacking(Backing):
    """Address space of the host; see `Backing`. Any thread may call its methods. Raises HostMemoryError."""

    can_shrink = True
    why_fixed = ""

    def __init__(self, num_bytes: int) -> None:
        self._map = reserve(num_bytes)
        super().__init__(torch.frombuffer(self._map, dtype=torch.uint8))
        self._memory = self.tensor.numpy()
        self._lock = threading.Lock()

    def populate(self) -> Iterator[None]:
        for start in range(0, len(self._memory), _PIECE):
            with self._lock:  # what was given back meanwhile stays so
                piece = self._memory[start : min(start + _PIECE, self.num_bytes)]
                if not len(piece) or not any(True for _ in populate(piece)):
                    return
            yield

    def resize(self, num_bytes: int) -> None:
        unit = _HUGE_PAGE if len(self._memory) >= _MANY else _SYSTEM_PAGE
        first = self._memory.ctypes.data
        with self._lock:
            self.num_bytes = num_bytes
            start = -(-(first + num_bytes) // unit) * unit - first
            if start < len(self._memory):
                self._map.madvise(mmap.MADV_DONTNEED, start, len(self._memory) - start)


def backing_of(num_bytes: int, device: torch.device, *, touched: bool = True, shrinks: bool = False) -> Backing:
    """Memory of frames, zero. Large host memory that is not `touched` is provided by the system when it is written. On
    a host it can shrink if it is large, or if it `shrinks`. Raises PlanError."""
    try:
        if device.type != "cpu" or not (shrinks or num_bytes >= _LARGE):
            return Backing(torch.zeros(num_bytes, dtype=torch.uint8, device=device))
        # Reads of scattered frames touch many system pages; huge pages cause far fewer TLB misses.
        backing = MappedBacking(num_bytes)
        if touched:
            touch(backing.tensor.numpy())
        return backing
    except (RuntimeError, MemoryError, HostMemoryError) as error:
        raise PlanError(
            f"a KV pool of {num_bytes:,} bytes could not be allocated on {device}: {error}", fix="lower the KV memory."
        ) from error
