"""Frames of one group, for pages that exist already. The stateful check of windows covers them too."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import InvalidFree, OutOfPages
from quire.memory.allocator import PagedTokenToKVPoolAllocator, PageFrames, TokenToKVPoolAllocator
from quire.memory.residency import Column


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def make(num_pages: int = 6, num_frames: int = 3) -> PageFrames:
    table = Column("window", num_pages, reclaims=False)
    return PageFrames(table, PagedTokenToKVPoolAllocator(num_frames * 4, 4, name="window"))


def test_pages_take_frames_and_drop_them() -> None:
    window = make()
    assert (window.name, window.num_frames, window.num_free) == ("window", 3, 3)
    window.take(ids(5, 2))
    assert window.table.frame.tolist() == [0, 0, 2, 0, 0, 1, 0]
    assert window.table.present(ids(1, 2, 5)).tolist() == [False, True, True]
    assert window.allocator.ids.is_out(ids(1, 2, 3)).tolist() == [True, True, False]
    window.drop(ids(4, 2, 1))
    assert window.num_free == 2
    assert window.table.frame.tolist() == [0, 0, 0, 0, 0, 1, 0]


def test_running_out_of_frames_changes_nothing() -> None:
    window = make()
    window.take(ids(1, 2))
    with pytest.raises(OutOfPages) as caught:
        window.take(ids(3, 4))
    assert (caught.value.group, caught.value.wanted, caught.value.free) == ("window", 2, 1)
    assert window.table.frame.tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert window.num_free == 1


def test_frames_come_back_in_ascending_order_whatever_the_order_of_the_pages() -> None:
    """Freed single-token frames are reused last, in the order in which they came back."""
    group = PageFrames(Column("full", 6, reclaims=False), TokenToKVPoolAllocator(4))
    group.take(ids(6, 5, 4, 3))
    group.drop(ids(3, 4, 5, 6))
    group.take(ids(1, 2, 3, 4))
    assert group.table.frame.tolist() == [0, 1, 2, 3, 4, 0, 0]


def test_handing_over_takes_and_frees_no_frame() -> None:
    window = make()
    window.take(ids(1, 2, 3))
    window.table.move(ids(2, 1), ids(6, 4))
    assert window.table.frame.tolist() == [0, 0, 0, 3, 1, 0, 2]
    assert window.num_free == 0
    assert window.allocator.ids.is_out(ids(1, 2, 3)).all()
    window.drop(ids(1, 4))
    assert window.table.frame.tolist() == [0, 0, 0, 3, 0, 0, 2]
    assert window.allocator.ids.is_out(ids(1, 2, 3)).tolist() == [False, True, True]


def test_a_frame_that_is_not_out_is_never_dropped() -> None:
    """The table and the allocator disagree: an error, not a frame with two owners."""
    window = make()
    window.take(ids(1))
    window.allocator.free_pages(ids(1))
    with pytest.raises(InvalidFree):
        window.drop(ids(1))
