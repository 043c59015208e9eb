"""Memory of a GPU that is mapped piece by piece, so that its end can be given back: CUDA's virtual memory.

Addresses for all of it are reserved once, and the first ones have memory behind them. So kernels, graphs and tensors
keep their addresses. Mappings change only when what the GPU computes has ended. It is off by default (`--elastic-gpu`):
tests run it on a stand-in of the driver in host memory, and no GPU has run it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import PlanError, RefusedCombination
from quire.memory.backing import Backing
from quire.plan.budget import format_bytes

PIECE = 32 * 2**20
"""Bytes that are mapped at once, if the driver's granularity divides them."""

_OUT_OF_MEMORY = 2
_PINNED = _DEVICE = 1
_READ_WRITE = 3

_u64, _size = ctypes.c_uint64, ctypes.c_size_t


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """What CUDA's driver has for memory of one device that is mapped. Addresses and sizes are multiples of `unit`.
    Raises PlanError where the device has no memory left, RuntimeError for any other failure, and OSError without a
    driver."""

    def __init__(self, device: int, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        self._call("cuInit", 0)
        where = _Location(_DEVICE, device)
        self._properties = _Properties(type=_PINNED, location=where)
        self._access = _Access(where, _READ_WRITE)
        unit = _size()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), 0)
        self.unit = -(-PIECE // unit.value) * unit.value

    def reserve(self, num_bytes: int) -> int:
        """Addresses without memory."""
        address = _u64()
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(num_bytes), _size(0), _u64(0), _u64(0))
        return address.value

    def free(self, address: int, num_bytes: int) -> None:
        """The addresses are no more; nothing is mapped there."""
        self._call("cuMemAddressFree", _u64(address), _size(num_bytes))

    def map(self, address: int) -> int:
        """Have `unit` bytes of memory there. Returns its handle."""
        handle, size = _u64(), _size(self.unit)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), _u64(0))
        try:
            self._call("cuMemMap", _u64(address), size, _size(0), handle, _u64(0))
            try:
                self._call("cuMemSetAccess", _u64(address), size, ctypes.byref(self._access), _size(1))
            except BaseException:
                self._call("cuMemUnmap", _u64(address), size)
                raise
        except BaseException:
            self._call("cuMemRelease", handle)
            raise
        return handle.value

    def unmap(self, address: int, handle: int) -> None:
        """Give `unit` bytes of memory back."""
        self._call("cuMemUnmap", _u64(address), _size(self.unit))
        self._call("cuMemRelease", _u64(handle))

    def _call(self, name: str, *given: Any) -> None:
        status = getattr(self._library, name)(*given)
        if status == _OUT_OF_MEMORY:
            raise PlanError("the GPU has no memory left.", fix="end what else has memory there, or ask for less.")
        if status:
            raise RuntimeError(f"{name} of CUDA's driver failed with {status}")


class CudaMapping:
    """Addresses for `num_bytes` bytes, and the memory behind the first of them. A tensor at the address keeps it: what
    is mapped is given back with the last one. `settle` waits until the device computes nothing, and `release` gives
    memory back that torch keeps for tensors to come."""

    def __init__(
        self, driver: CudaDriver, num_bytes: int, settle: Callable[[], None], release: Callable[[], None]
    ) -> None:
        self.num_bytes = num_bytes
        self.settle = settle
        self._release = release
        self._driver = driver
        self._handles: list[int] = []
        self._size = -(-num_bytes // driver.unit) * driver.unit
        self.address = driver.reserve(self._size)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def resize(self, num_bytes: int) -> None:
        """Have memory for the first `num_bytes`, and less than a piece more. Raises what the driver raises, with what
        there was."""
        self.settle()
        before, wanted = len(self._handles), -(-num_bytes // self._driver.unit)
        try:
            try:
                self._map(wanted)
            except PlanError:
                self._release()
                self._map(wanted)
        except BaseException:
            self._unmap(before)
            raise
        self._unmap(wanted)

    def _map(self, count: int) -> None:
        while len(self._handles) < count:
            self._handles.append(self._driver.map(self.address + len(self._handles) * self._driver.unit))

    def _unmap(self, count: int) -> None:
        while (last := len(self._handles) - 1) >= count:
            self._driver.unmap(self.address + last * self._driver.unit, self._handles[last])
            del self._handles[last]

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self.settle()
            self._unmap(0)
            self._driver.free(self.address, self._size)


class CudaBacking(Backing):
    """A `Backing` of a GPU that can shrink, with zeros. `view` makes the tensor of a mapping. Raises what `CudaDriver`
    raises."""

    can_shrink = True
    why_fixed = ""

    def __init__(
        self,
        num_bytes: int,
        driver: CudaDriver,
        view: Callable[[CudaMapping], Tensor],
        settle: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        self._mapping = CudaMapping(driver, num_bytes, settle, release)
        self._mapping.resize(num_bytes)
        super().__init__(view(self._mapping))
        assert self.tensor.data_ptr() == self._mapping.address, "a copy"
        self._clear(0)

    def resize(self, num_bytes: int) -> None:
        before = self.num_bytes
        self._mapping.resize(num_bytes)
        self.num_bytes = num_bytes
        self._clear(before)

    def _clear(self, start: int) -> None:
        """Zeros from there on, before copies of other streams may write there."""
        if start < self.num_bytes:
            self.tensor[start : self.num_bytes].zero_()
            self._mapping.settle()


def cuda_backing(num_bytes: int, device: torch.device) -> CudaBacking:
    """Memory of frames on a GPU that can shrink. Raises PlanError, and RefusedCombination on another device."""
    if device.type != "cuda":
        raise RefusedCombination(
            f"--elastic-gpu is for KV memory of a GPU with CUDA, and the model is on {device}.",
            fix="leave it out: on a CPU the size changes without it.",
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    view = partial(torch.as_tensor, device=torch.device("cuda", index))
    try:
        settle = partial(torch.cuda.synchronize, index)
        return CudaBacking(num_bytes, CudaDriver(index), view, settle, torch.cuda.empty_cache)
    except (RuntimeError, OSError, PlanError) as error:
        raise PlanError(
            f"a KV pool of {format_bytes(num_bytes)} could not be mapped on {device}: {error}",
            fix="lower the KV memory, or leave out --elastic-gpu.",
        ) from error
