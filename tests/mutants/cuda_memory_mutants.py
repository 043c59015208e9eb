"""Mistakes with memory of a GPU that is mapped piece by piece."""

from __future__ import annotations

from quire.engine.device.cuda_memory import CudaBacking, CudaDriver, CudaMapping
from tests.mutants.mutants import Patch, mutant


@mutant("mapped memory", "frames that come again have the bytes of other requests")
def mapped_again_with_old_bytes(patch: Patch) -> None:
    def resize(backing: CudaBacking, num_bytes: int) -> None:
        backing._mapping.resize(num_bytes)
        backing.num_bytes = num_bytes

    patch.setattr(CudaBacking, "resize", resize)


@mutant("mapped memory", "a growth that fails keeps what it got, and a GPU that lacks memory lacks more")
def a_failed_growth_keeps_pieces(patch: Patch) -> None:
    def resize(mapping: CudaMapping, num_bytes: int) -> None:
        wanted = -(-num_bytes // mapping._driver.unit)
        while len(mapping._handles) < wanted:
            mapping._handles.append(mapping._driver.map(mapping.address + len(mapping._handles) * mapping._driver.unit))
        mapping._unmap(wanted)

    patch.setattr(CudaMapping, "resize", resize)


@mutant("mapped memory", "a server says that it gave memory back, and the GPU has none of it")
def pieces_stay_on_the_device(patch: Patch) -> None:
    patch.setattr(CudaDriver, "unmap", lambda driver, address, handle: None)
