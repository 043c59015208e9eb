"""Slots of recurrent state: promises one by one. The stateful check has the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import InvalidFree, InvalidInput, OutOfPages
from quire.memory.allocator import BaseTokenToKVPoolAllocator, MambaSlotAllocator


def test_slots_start_at_one_and_are_reused_last() -> None:
    allocator = MambaSlotAllocator(4)
    first = allocator.alloc(2)
    assert first.dtype == np.int32 and first.tolist() == [1, 2]
    allocator.free(first[::-1])
    assert allocator.alloc(4).tolist() == [3, 4, 2, 1]
    assert allocator.available_size() == 0


def test_running_out_changes_nothing() -> None:
    allocator = MambaSlotAllocator(3, name="linear")
    allocator.alloc(1)
    for attempt in (lambda: allocator.alloc(3), lambda: allocator.alloc_group_begin(3)):
        with pytest.raises(OutOfPages) as caught:
            attempt()
        assert (caught.value.group, caught.value.wanted, caught.value.free) == ("linear", 3, 2)
        assert allocator.available_size() == 2
    assert allocator.alloc(2).tolist() == [2, 3], "no group was opened"


def test_a_group_hands_out_what_it_set_aside_and_gives_the_rest_back() -> None:
    allocator = MambaSlotAllocator(6)
    allocator.alloc_group_begin(3)
    assert (allocator.available_size(), allocator.num_set_aside) == (3, 3)
    assert not allocator.ids.is_out(np.arange(7)).any()
    assert allocator.alloc(1).tolist() == [1]
    with pytest.raises(OutOfPages) as caught:
        allocator.alloc(3)
    assert (caught.value.wanted, caught.value.free) == (3, 2)
    with pytest.raises(InvalidFree):
        allocator.free([2])
    allocator.free([1])
    assert (allocator.available_size(), allocator.num_set_aside) == (4, 2)
    allocator.alloc_group_end()
    assert (allocator.available_size(), allocator.num_set_aside) == (6, 0)
    assert allocator.alloc(6).tolist() == [4, 5, 6, 1, 2, 3]


def test_groups_do_not_nest_and_must_be_open_to_end() -> None:
    allocator = MambaSlotAllocator(2)
    with pytest.raises(AssertionError):
        allocator.alloc_group_end()
    allocator.alloc_group_begin(1)
    with pytest.raises(AssertionError):
        allocator.alloc_group_begin(1)
    assert allocator.num_set_aside == 1


@pytest.mark.parametrize("wrong", [[1, 0], [1, 3], [1, -1], [1, 5], [1, 2**32 + 1], [1, 2, 2], [1.0], [True]])
def test_a_wrong_free_changes_nothing(wrong: list[int]) -> None:
    allocator = MambaSlotAllocator(4)
    allocator.alloc(3)
    allocator.free([3])
    with pytest.raises(InvalidFree, match="state"):
        allocator.free(wrong)
    assert allocator.ids.is_out(np.arange(5)).tolist() == [False, True, True, False, False]
    assert allocator.available_size() == 2


def test_ids_are_given_back_from_the_host_only() -> None:
    allocator = MambaSlotAllocator(8)
    allocator.alloc(6)
    for elsewhere in (torch.tensor([1, 2], device="meta"), torch.empty(0, dtype=torch.int64, device="meta")):
        with pytest.raises(InvalidFree, match="'meta'"):
            allocator.free(elsewhere)
    assert allocator.available_size() == 2
    allocator.free(torch.tensor([1, 2]))
    allocator.free(torch.tensor([3], dtype=torch.int32))
    allocator.free([4])
    allocator.free(np.int64(5))
    allocator.free([])
    allocator.free(torch.empty(0, dtype=torch.int64))
    assert allocator.available_size() == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_ids_on_a_gpu_are_refused() -> None:
    allocator = MambaSlotAllocator(2)
    slots = allocator.alloc(1)
    with pytest.raises(InvalidFree, match="'cuda'"):
        allocator.free(torch.from_numpy(slots).to("cuda"))
    assert allocator.available_size() == 1


def test_clear_forgets_everything() -> None:
    allocator = MambaSlotAllocator(3)
    allocator.alloc(2)
    allocator.alloc_group_begin(1)
    allocator.clear()
    assert (allocator.num_set_aside, allocator.available_size()) == (0, 3)
    assert allocator.alloc(3).tolist() == [1, 2, 3]


def test_other_wrong_input() -> None:
    with pytest.raises(InvalidInput, match="holds none"):
        MambaSlotAllocator(0)
    allocator = MambaSlotAllocator(2)
    for wrong in (lambda: allocator.alloc(-1), lambda: allocator.alloc_group_begin(-1)):
        with pytest.raises(InvalidInput):
            wrong()
    assert (allocator.size, allocator.available_size()) == (2, 2)
    assert len(allocator.alloc(0)) == 0


def test_it_is_no_allocator_of_tokens() -> None:
    assert not issubclass(MambaSlotAllocator, BaseTokenToKVPoolAllocator)
