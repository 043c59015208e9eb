"""The allocators' promises one by one, with traces worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import InvalidFree, InvalidInput, OutOfPages
from quire.memory.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from tests.covering import each_of

PAGE_SIZES = (1, 2, 3, 4, 16, 64, 256)


def make(page_size: int, num_pages: int, *, need_sort: bool = False) -> BaseTokenToKVPoolAllocator:
    if page_size == 1:
        return TokenToKVPoolAllocator(num_pages, need_sort=need_sort)
    return PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, need_sort=need_sort)


def decode(allocator: BaseTokenToKVPoolAllocator, seq_lens: list[int], last_loc: list[int]) -> np.ndarray:
    """One more slot for each sequence."""
    return allocator.alloc_extend([length - 1 for length in seq_lens], seq_lens, last_loc)


def with_free_pages(page_size: int, num_pages: int, free: list[int]) -> BaseTokenToKVPoolAllocator:
    """Only these pages are free, to be handed out in this order."""
    allocator = make(page_size, num_pages)
    allocator.alloc_pages(num_pages)
    allocator.free_pages(np.array(free, dtype=np.int32))
    return allocator


# -- worked traces


def test_an_extension_fills_the_old_page_then_whole_pages_then_a_part() -> None:
    """Pages of 4; 6 tokens end on page 4 at offset 1. To 15: 2 slots of page 4, all of page 5, 3 slots of page 7."""
    allocator = with_free_pages(4, 9, [5, 7, 9])
    slots = allocator.alloc_extend([6], [15], [17], 9)
    assert slots.tolist() == [18, 19, 20, 21, 22, 23, 28, 29, 30]
    assert allocator.available_size() == 4
    assert allocator.alloc_pages(1).tolist() == [9]


@pytest.mark.parametrize(
    ("page_size", "before", "after", "new_pages"),
    [
        (16, 20, 50, 2),
        (16, 32, 33, 1),
        (16, 33, 48, 0),
        (16, 0, 1, 1),
        (16, 16, 16, 0),
        (1, 3, 7, 4),
        (256, 255, 257, 1),
    ],
)
def test_new_pages_of_an_extension(page_size: int, before: int, after: int, new_pages: int) -> None:
    allocator = make(page_size, 8)
    first = allocator.alloc_extend([0], [before], [-1])
    free = allocator.num_free_pages
    slots = allocator.alloc_extend([before], [after], [int(first[-1]) if before else -1])
    assert free - allocator.num_free_pages == new_pages
    assert len(slots) == after - before


def test_over_allocation_is_given_back_from_the_first_whole_page() -> None:
    """50 of 306 tokens committed, pages of 16: the tree keeps 48; the page of 48..50 and [64, 306) go back."""
    allocator = make(16, 20)
    slots = allocator.alloc_extend([0], [306], [-1])
    assert allocator.num_free_pages == 0
    allocator.free(slots[48:50])
    assert allocator.num_free_pages == 1
    allocator.free(slots[64:])
    assert allocator.num_free_pages == 17
    assert allocator.ids.is_out(slots[:48:16] // 16).all()


def test_several_sequences_are_packed_in_order() -> None:
    allocator = make(2, 10)
    assert allocator.alloc_extend([0, 0, 0], [3, 0, 1], [-1, -1, -1]).tolist() == [2, 3, 4, 6]
    assert allocator.alloc_extend([3, 1], [4, 4], [4, 6]).tolist() == [5, 7, 8, 9]
    assert decode(allocator, [5, 5], [5, 9]).tolist() == [10, 12]
    assert decode(allocator, [6, 6], [10, 12]).tolist() == [11, 13]


# -- every page size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_ids_start_at_page_one_and_cover_the_pool(page_size: int) -> None:
    allocator = make(page_size, 5)
    slots = allocator.alloc(5 * page_size)
    assert slots.tolist() == list(range(page_size, 6 * page_size))
    assert slots.dtype == np.int32
    assert allocator.available_size() == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("need_sort", [False, True])
def test_running_out_changes_nothing(page_size: int, need_sort: bool) -> None:
    allocator = make(page_size, 3, need_sort=need_sort)
    slots = allocator.alloc_extend([0], [page_size], [-1])
    for attempt in (
        lambda: allocator.alloc(3 * page_size),
        lambda: allocator.alloc_extend([0, 0], [2 * page_size, 1], [-1, -1]),
        lambda: decode(allocator, [1, page_size + 1, 1], [-1, int(slots[-1]), -1]),
        lambda: allocator.alloc_pages(3),
    ):
        with pytest.raises(OutOfPages) as caught:
            attempt()
        assert (caught.value.group, caught.value.wanted, caught.value.free) == ("full", 3, 2)
        assert allocator.available_size() == 2 * page_size
    assert allocator.alloc(2 * page_size).tolist() == list(range(2 * page_size, 4 * page_size))


@each_of("page_size", PAGE_SIZES)
@each_of("slot", ["again", "padding", "negative", "beyond", "far beyond"])
def test_a_wrong_free_changes_nothing(page_size: int, slot: str) -> None:
    allocator = make(page_size, 4)
    mine = allocator.alloc(3 * page_size)
    allocator.free(mine[2 * page_size :])
    wrong = {
        "again": int(mine[-1]),
        "padding": page_size - 1,
        "negative": -1,
        "beyond": 5 * page_size,
        "far beyond": (2**32 + 1) * page_size,  # wraps around to page 1 in 32 bits
    }[slot]
    with pytest.raises(InvalidFree):
        allocator.free(np.array([int(mine[page_size]), wrong], dtype=np.int64))
    assert allocator.available_size() == 2 * page_size
    assert allocator.ids.is_out(np.array([1, 2], dtype=np.int32)).all()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_need_sort_reuses_in_ascending_order(page_size: int) -> None:
    allocator = make(page_size, 6, need_sort=True)
    pages = allocator.alloc_pages(6)
    for page in (5, 2, 6, 1):
        allocator.free_pages(pages[pages == page])
    assert allocator.num_free_pages == 4
    assert allocator.alloc_pages(4).tolist() == [1, 2, 5, 6]


def test_token_reuse_is_last_and_paged_reuse_is_first() -> None:
    token, paged = make(1, 4), make(2, 4)
    for allocator in (token, paged):
        allocator.free_pages(allocator.alloc_pages(2))
    assert token.alloc_pages(4).tolist() == [3, 4, 1, 2]
    assert paged.alloc_pages(4).tolist() == [1, 2, 3, 4]
    paged.free(np.array([9, 4, 8, 5]))
    assert paged.alloc_pages(2).tolist() == [2, 4]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("need_sort", [False, True])
def test_a_free_group_gives_back_at_its_end(page_size: int, need_sort: bool) -> None:
    allocator = make(page_size, 4, need_sort=need_sort)
    slots = allocator.alloc(4 * page_size)
    allocator.free_group_begin()
    allocator.free(slots[:page_size])
    allocator.free(slots[2 * page_size :])
    assert allocator.available_size() == 0
    with pytest.raises(InvalidFree):
        allocator.free(slots[:1])
    allocator.free_group_end()
    assert allocator.available_size() == 3 * page_size
    assert allocator.alloc_pages(3).tolist() == [1, 3, 4]


def test_an_empty_free_group_and_an_empty_free_are_nothing() -> None:
    allocator = make(4, 4)
    allocator.free_group_begin()
    allocator.free(np.array([], dtype=np.int64))
    allocator.free_group_end()
    assert allocator.num_free_pages == 4
    assert len(allocator.alloc(0)) == len(allocator.alloc_extend([], [], [])) == 0


def test_free_groups_do_not_nest_and_must_be_open_to_end() -> None:
    allocator = make(1, 2)
    with pytest.raises(AssertionError):
        allocator.free_group_end()
    allocator.free_group_begin()
    with pytest.raises(AssertionError):
        allocator.free_group_begin()
    allocator.clear()
    allocator.free_group_begin()


def test_clear_forgets_everything() -> None:
    allocator = make(4, 3)
    allocator.alloc_pages(3)
    allocator.clear()
    assert allocator.alloc_pages(3).tolist() == [1, 2, 3]


# -- wrong input


@pytest.mark.parametrize(
    ("size", "page_size", "text"), [(0, 1, "0 tokens"), (3, 4, "at least 4"), (-1, 1, "-1"), (4, 0, "page_size")]
)
def test_a_pool_without_a_page_is_refused(size: int, page_size: int, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        PagedTokenToKVPoolAllocator(size, page_size)


def test_size_is_floored_to_whole_pages() -> None:
    allocator = PagedTokenToKVPoolAllocator(11, 4)
    assert (allocator.num_pages, allocator.size, allocator.available_size()) == (2, 8, 8)


@pytest.mark.parametrize(
    ("prefix", "seq", "last"),
    [([4], [3], [7]), ([-1], [3], [-1]), ([1], [2], [-1]), ([0], [2], [4]), ([0, 0], [1], [-1]), ([0], [1], [])],
)
def test_lengths_that_cannot_be_are_refused(prefix: list[int], seq: list[int], last: list[int]) -> None:
    allocator = make(4, 4)
    with pytest.raises(InvalidInput):
        allocator.alloc_extend(prefix, seq, last)
    assert allocator.num_free_pages == 4


def test_other_wrong_input() -> None:
    allocator = make(4, 4)
    for wrong in (
        lambda: allocator.alloc(3),
        lambda: allocator.alloc(-4),
        lambda: allocator.alloc_pages(-1),
        lambda: allocator.alloc_extend([0], [4], [-1], 3),
        lambda: decode(allocator, [0], [-1]),
    ):
        with pytest.raises(InvalidInput):
            wrong()
    assert allocator.num_free_pages == 4
