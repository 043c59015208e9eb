"""Two sides with one id: promises one by one, with numbers worked out by hand. The stateful check has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import InvalidFree, InvalidInput, OutOfPages
from quire.memory.allocator import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from quire.memory.residency import Column
from quire.spec.pages import floor_to_page
from tests.memory.swa_machine import free_swa, window_slots

PAGE_SIZES = (1, 2, 3, 4, 16, 64)


def make(page_size: int, pages: int, windows: int, *, need_sort: bool = False) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(pages * page_size, windows * page_size, page_size, need_sort=need_sort)


def everything(allocator: SWATokenToKVPoolAllocator) -> tuple[object, ...]:
    full = allocator.full_attn_allocator
    return (
        allocator.full_to_swa_page_mapping.tolist(),
        allocator.full_available_size(),
        allocator.swa_available_size(),
        full.ids.is_out(np.arange(full.num_pages + 1)).tolist(),
        allocator.allocator.ids.is_out(np.arange(allocator.num_frames + 1)).tolist(),
    )


# -- worked numbers


def test_a_decoding_sequence_keeps_a_window_and_gives_back_what_is_before_it() -> None:
    """P = 16, W = 128: after 1000 tokens, the next reads from 873 on. Its windows before page 54 can go: 864 tokens."""
    allocator = make(16, 70, 70)
    slots = allocator.alloc_extend([0], [1000], [-1])
    frontier = floor_to_page(1000 - 128, 16)
    assert frontier == 864
    free_swa(allocator, slots[:frontier])
    assert allocator.swa_available_size() == (70 - 9) * 16
    assert allocator.full_available_size() == 7 * 16
    assert (window_slots(allocator, slots[:frontier]) < 16).all()
    assert allocator.alloc_extend([1000], [1001], slots[-1:]).tolist() == [int(slots[-1]) + 1]


# -- the map


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slots_are_translated_page_by_page(page_size: int) -> None:
    allocator = make(page_size, 5, 3)
    first, second = allocator.alloc(page_size), allocator.alloc(page_size)
    free_swa(allocator, first)
    third = allocator.alloc(2 * page_size)
    assert allocator.full_to_swa_page_mapping.dtype == np.int32
    windows = allocator.full_to_swa_page_mapping.tolist()
    assert windows[:3] == [0, 0, 2] and sorted(windows[3:5]) == [1, 3] and windows[5:] == [0, -1]
    offsets = np.arange(page_size)
    assert window_slots(allocator, first).tolist() == offsets.tolist()
    assert window_slots(allocator, second).tolist() == (2 * page_size + offsets).tolist()
    assert window_slots(allocator, third).tolist() == [w * page_size + o for w in windows[3:5] for o in offsets]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_no_slot_translates_to_no_slot(page_size: int) -> None:
    allocator = make(page_size, 2, 2)
    slot = int(allocator.alloc(page_size)[-1])
    table = np.array([[-1, slot], [0, -1]], dtype=np.int32)
    assert window_slots(allocator, table).tolist() == [[-1, slot], [0, -1]]
    assert window_slots(allocator, []).tolist() == []


def test_the_map_is_a_column_of_the_residency_table() -> None:
    table = Column("local", 6, reclaims=True)
    full = PagedTokenToKVPoolAllocator(12, 2)
    allocator = SWATokenToKVPoolAllocator(12, 8, 2, name="local", full=full, table=table)
    assert (allocator.name, allocator.page_size, allocator.size, allocator.size_swa) == ("local", 2, 12, 8)
    slots = allocator.alloc(4)
    assert np.shares_memory(allocator.full_to_swa_page_mapping, table.mapping)
    assert table.frame.tolist() == [0, 1, 2, 0, 0, 0, 0]
    others = full.alloc_pages(3)
    allocator.take(others[:2])
    assert table.frame.tolist() == [0, 1, 2, 3, 4, 0, 0]
    with pytest.raises(OutOfPages, match="local"):
        allocator.take(others[2:])
    allocator.free(slots)
    assert full.num_free_pages == 3 and allocator.num_free == 2


# -- all or nothing


def test_when_the_window_side_is_short_a_decode_leaks_no_page_of_the_full_side() -> None:
    """Three sequences cross into a new page; the full side has 5 pages left, the window side 2."""
    allocator = make(4, 8, 5)
    slots = allocator.alloc(12)
    before = everything(allocator)
    with pytest.raises(OutOfPages) as caught:
        allocator.alloc_extend([4, 4, 4], [5, 5, 5], slots[3::4])
    assert (caught.value.group, caught.value.wanted, caught.value.free) == ("window", 3, 2)
    assert everything(allocator) == before
    assert len(allocator.alloc_extend([4, 4], [5, 5], slots[3:8:4])) == 2


def test_when_the_full_side_is_short_a_decode_leaks_no_page_of_the_window_side() -> None:
    allocator = make(4, 5, 8)
    slots = allocator.alloc(12)
    before = everything(allocator)
    with pytest.raises(OutOfPages) as caught:
        allocator.alloc_extend([4, 4, 4], [5, 5, 5], slots[3::4])
    assert (caught.value.group, caught.value.wanted, caught.value.free) == ("full", 3, 2)
    assert everything(allocator) == before


@pytest.mark.parametrize(("pages", "windows", "short"), [(2, 5, "full"), (5, 2, "window"), (2, 2, "full")])
@pytest.mark.parametrize("need_sort", [False, True])
def test_a_shortage_of_either_side_changes_nothing(pages: int, windows: int, short: str, need_sort: bool) -> None:
    allocator = make(2, pages, windows, need_sort=need_sort)
    allocator.free(allocator.alloc(2))
    before = everything(allocator)
    for attempt in (
        lambda: allocator.alloc(6),
        lambda: allocator.alloc_extend([0, 0], [3, 1], [-1, -1]),
        lambda: allocator.alloc_extend([0, 0, 0], [1, 1, 1], [-1, -1, -1]),
    ):
        with pytest.raises(OutOfPages) as caught:
            attempt()
        assert (caught.value.group, caught.value.wanted, caught.value.free) == (short, 3, 2)
        assert everything(allocator) == before
    assert allocator.available_size() == 4
    assert len(allocator.alloc(4)) == 4


def test_a_sequence_does_not_go_on_inside_a_page_whose_window_is_gone() -> None:
    allocator = make(4, 8, 8)
    slots = allocator.alloc_extend([0, 0], [6, 4], [-1, -1])
    free_swa(allocator, slots[4:6])
    before, last = everything(allocator), [int(slots[5]), int(slots[9])]
    for attempt in (
        lambda: allocator.alloc_extend([6, 4], [9, 9], last),
        lambda: allocator.alloc_extend([6, 4], [7, 5], last),
        lambda: allocator.alloc_extend([6], [7], [99 * 4 + 1]),
        lambda: allocator.alloc_extend([6], [7], [1]),
    ):
        with pytest.raises(InvalidInput, match="no window"):
            attempt()
        assert everything(allocator) == before
    assert len(allocator.alloc_extend([6], [6], last[:1])) == 0
    assert len(allocator.alloc_extend([4], [5], last[1:])) == 1


def test_wrong_lengths_are_refused() -> None:
    allocator = make(4, 4, 4)
    before = everything(allocator)
    for wrong in (
        lambda: allocator.alloc(3),
        lambda: allocator.alloc(-4),
        lambda: allocator.alloc_extend([0], [4], [-1], 3),
        lambda: allocator.alloc_extend([4], [3], [7]),
        lambda: allocator.alloc_extend([-1], [0], [-1]),
    ):
        with pytest.raises(InvalidInput):
            wrong()
        assert everything(allocator) == before


@pytest.mark.parametrize(("size", "size_swa"), [(3, 8), (8, 3), (8, 0), (-4, 8)])
def test_a_side_without_a_page_is_refused(size: int, size_swa: int) -> None:
    with pytest.raises(InvalidInput, match="holds no page"):
        SWATokenToKVPoolAllocator(size, size_swa, 4)


# -- giving back


def test_a_page_is_given_back_whole_on_both_sides() -> None:
    allocator = make(4, 4, 3)
    slots = allocator.alloc(12)
    free_swa(allocator, slots[5:6])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (4, 4)
    allocator.free(slots[2:7])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (12, 8)
    assert allocator.full_to_swa_page_mapping.tolist() == [0, 0, 0, 3, 0, -1]


def test_windows_are_given_back_once_and_only_for_pages_that_are_out() -> None:
    allocator = make(2, 5, 5)
    slots = allocator.alloc(8)
    allocator.free(slots[6:])
    free_swa(allocator, slots[:2])
    before = everything(allocator)
    for wrong in ([0], [2], [8], [11], [12], [-1], [2**33 + 2], [4, 2], [4, 8]):
        with pytest.raises(InvalidFree):
            free_swa(allocator, wrong)
        assert everything(allocator) == before
    for wrong in ([0], [8], [12], [-1], [4, 8]):
        with pytest.raises(InvalidFree):
            allocator.free(wrong)
        assert everything(allocator) == before
    allocator.free(slots[:6])
    assert allocator.available_size() == 10


@pytest.mark.parametrize("need_sort", [False, True])
def test_a_group_of_frees_forgets_the_window_at_once(need_sort: bool) -> None:
    """A page freed in a group and one that lost its window: neither is found by its old id before the group ends."""
    allocator = make(2, 4, 4, need_sort=need_sort)
    slots = allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free(slots[:2])
    free_swa(allocator, slots[2:4])
    assert allocator.full_to_swa_page_mapping.tolist() == [0, 0, 0, 3, 4, -1]
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (0, 0)
    allocator.free_group_end()
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (2, 4)


def test_clear_forgets_both_sides_and_the_map() -> None:
    allocator = make(2, 6, 4)
    allocator.alloc(8)
    allocator.free_group_begin()
    allocator.clear()
    assert allocator.full_to_swa_page_mapping.tolist() == [0] * 7 + [-1]
    assert allocator.alloc(8).tolist() == list(range(2, 10))
