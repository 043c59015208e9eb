"""PinnedSlices: host memory that is registered with CUDA, so that copies from and to it run beside everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import HostMemoryError

_SLICE = 2**30
_SYSTEM_PAGE = 4096
_FLAGS = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped: for all devices, also for kernels that read it
_NO_MEMORY = 2  # cudaErrorMemoryAllocation


def slice_rows(stride: int) -> int:
    """Rows of `stride` bytes in a slice, about 1 GiB of whole system pages. No copy may cross the end of a slice:
    CUDA need not take it for one of registered memory."""
    least = _SYSTEM_PAGE // int(np.gcd(stride, _SYSTEM_PAGE))
    return max(1, _SLICE // stride // least) * least


class PinnedSlices:
    """Registers the rows of `regions`, each uint8 `[rows, stride]` from a system page on, slice by slice, because one
    call for a terabyte says nothing for a minute. `progress` is called with the registered bytes and all bytes.

    Registered until `close`. Raises HostMemoryError that names CUDA's error, and whatever `progress` raises; nothing is
    registered then.
    """

    def __init__(self, regions: Sequence[npt.NDArray[np.uint8]], progress: Callable[[int, int], None] | None) -> None:
        import torch

        self._cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._addresses: list[int] = []
        done, total = 0, sum(region.nbytes for region in regions)
        try:
            for region in regions:
                size = slice_rows(region.shape[1])
                for start in range(0, len(region), size):
                    some = region[start : start + size]
                    self._register(some.ctypes.data, some.nbytes)
                    done += some.nbytes
                    if progress is not None:
                        progress(done, total)
        except BaseException:
            self.close()
            raise

    def _register(self, address: int, num_bytes: int) -> None:
        status = self._cuda.cudaHostRegister(address, num_bytes, _FLAGS)
        if int(status) == 0:
            self._addresses.append(address)
            return
        limits = int(status) == _NO_MEMORY
        raise HostMemoryError(
            f"{num_bytes:,} bytes of host memory could not be pinned: CUDA error {int(status)}, "
            f"{self._cuda.cudaGetErrorString(status)}.",
            fix="lower --host-memory" + (", or raise the limit of locked memory (ulimit -l)." if limits else "."),
        )

    def close(self) -> None:
        """Unregister all memory. The caller has waited for all copies. A second call does nothing."""
        while self._addresses:
            self._cuda.cudaHostUnregister(self._addresses.pop())
