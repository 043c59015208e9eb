"""The frame table: where pages are, per tier and group."""

from __future__ import annotations

import numpy as np
import pytest

from quire.memory.frames import FrameTable
from quire.spec.ids import Tier


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_bind_and_unbind_are_edits_of_one_column() -> None:
    table = FrameTable(4, 2, (Tier.DEVICE, Tier.HOST))
    table.bind(Tier.DEVICE, 1, ids(2, 4), ids(7, 3))
    assert table.column(Tier.DEVICE, 1).tolist() == [0, 0, 7, 0, 3]
    assert not table.column(Tier.DEVICE, 0).any()
    assert not table.column(Tier.HOST, 1).any()
    assert table.resident(Tier.DEVICE, 1, ids(1, 2, 4)).tolist() == [False, True, True]
    assert table.unbind(Tier.DEVICE, 1, ids(4, 1, 2)).tolist() == [3, 7]
    assert not table.column(Tier.DEVICE, 1).any()


def test_no_place_maps_to_no_place() -> None:
    """Behind the last page is a -1, which `bind` and `unbind` never touch and `column` does not show."""
    table = FrameTable(3, 2)
    table.bind(Tier.DEVICE, 1, ids(1, 3), ids(5, 2))
    mapping = table.mapping(Tier.DEVICE, 1)
    assert mapping.tolist() == [0, 5, 0, 2, -1]
    assert mapping[ids(-1, 3, 0)].tolist() == [-1, 2, 0]
    table.unbind(Tier.DEVICE, 1, ids(3, 2))
    assert mapping.tolist() == [0, 5, 0, 0, -1], "the mapping is live"
    assert len(table.column(Tier.DEVICE, 1)) == 4
    with pytest.raises(IndexError):
        table.bind(Tier.DEVICE, 1, ids(4), ids(1))
    assert table.mapping(Tier.DEVICE, 0).tolist() == [0, 0, 0, 0, -1]


def test_frames_move_from_page_to_page_in_order() -> None:
    table = FrameTable(5, 2)
    for group in (0, 1):
        table.bind(Tier.DEVICE, group, ids(1, 2, 3), ids(9, 8, 7))
    table.move(Tier.DEVICE, 1, ids(3, 1), ids(4, 5))
    assert table.column(Tier.DEVICE, 1).tolist() == [0, 0, 8, 0, 7, 9]
    assert table.column(Tier.DEVICE, 0).tolist() == [0, 9, 8, 7, 0, 0]
    table.move(Tier.DEVICE, 1, ids(), ids())


@pytest.mark.parametrize(("old", "new"), [((3, 1), (4,)), ((4,), (5,)), ((1, 4), (4, 5)), ((1,), (2,)), ((0,), (4,))])
def test_a_frame_moves_from_a_resident_page_to_one_that_is_not(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    table = FrameTable(5, 1)
    table.bind(Tier.DEVICE, 0, ids(1, 2, 3), ids(9, 8, 7))
    with pytest.raises(AssertionError):
        table.move(Tier.DEVICE, 0, ids(*old), ids(*new))
    assert table.mapping(Tier.DEVICE, 0).tolist() == [0, 9, 8, 7, 0, 0, -1]


def test_the_padding_page_maps_to_the_padding_frame() -> None:
    table = FrameTable(3, 1)
    table.bind(Tier.DEVICE, 0, ids(1, 2, 3), ids(3, 2, 1))
    assert table.column(Tier.DEVICE, 0)[0] == 0


def test_a_resident_page_is_not_bound_again() -> None:
    table = FrameTable(2, 1)
    table.bind(Tier.DEVICE, 0, ids(1), ids(1))
    with pytest.raises(AssertionError, match="resident"):
        table.bind(Tier.DEVICE, 0, ids(2, 1), ids(2, 1))
    assert table.column(Tier.DEVICE, 0).tolist() == [0, 1, 0]
