"""Memory of pools whose end can be given back to the system."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import psutil
import pytest
import torch

from quire.errors import RefusedCombination
from quire.memory.backing import Backing, MappedBacking, backing_of

MIB = 2**20
CPU = torch.device("cpu")


def resident(backing: Backing) -> int:
    """Bytes that the system provides, by its own account of each page."""
    address, length = backing.tensor.data_ptr(), backing.tensor.nbytes
    pages = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
    found = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_void_p(pages.ctypes.data)
    )
    assert found == 0
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE


@pytest.mark.parametrize("num_bytes", [64 * MIB, 320 * MIB])
def test_what_is_given_back_is_gone_and_the_rest_stays(num_bytes: int) -> None:
    backing, least = MappedBacking(num_bytes), num_bytes // 2 + 12_345
    backing.tensor.fill_(7)
    assert resident(backing) == num_bytes
    backing.resize(least)
    assert least <= resident(backing) < least + num_bytes // 100
    assert backing.tensor[:least].eq(7).all()
    backing.resize(num_bytes)
    assert resident(backing) < least + num_bytes // 100
    assert list(backing.populate()) == [None] * (num_bytes // (16 * MIB))
    assert resident(backing) == num_bytes
    assert not backing.tensor[least + 2 * MIB :].any() and backing.tensor[:least].eq(7).all()


def test_what_the_system_counts_for_the_process_follows() -> None:
    backing = MappedBacking(256 * MIB)
    backing.tensor.fill_(7)
    before = psutil.Process().memory_info().rss
    backing.resize(64 * MIB)
    assert before - psutil.Process().memory_info().rss == pytest.approx(192 * MIB, rel=0.03)


def test_what_is_given_back_while_it_is_provided_stays_so() -> None:
    backing = MappedBacking(128 * MIB)
    pieces = backing.populate()
    for _ in range(5):
        next(pieces)
    backing.resize(40 * MIB)
    assert list(pieces) == []
    assert resident(backing) == 40 * MIB
    backing.resize(0)
    assert resident(backing) == 0


def test_a_size_that_is_given_twice_changes_nothing() -> None:
    backing = MappedBacking(8 * MIB)
    backing.tensor.fill_(3)
    for _ in range(2):
        backing.resize(5 * MIB)
    assert backing.tensor[: 5 * MIB].eq(3).all()


def test_large_memory_of_a_host_can_shrink_and_small_memory_if_it_is_asked_for() -> None:
    assert backing_of(8 * MIB, CPU).can_shrink
    assert not backing_of(MIB, CPU).can_shrink
    small = backing_of(MIB, CPU, shrinks=True)
    assert small.can_shrink and not small.tensor.any()


def test_memory_of_a_fixed_size_says_why() -> None:
    backing = backing_of(MIB, CPU)
    with pytest.raises(RefusedCombination, match="small pools on cpu have a fixed size") as caught:
        backing.resize(0)
    assert "--kv-memory" in caught.value.fix
    on_device = Backing(torch.zeros(0, device="meta"))
    assert on_device.why_fixed == "KV pools on meta have a fixed size."
