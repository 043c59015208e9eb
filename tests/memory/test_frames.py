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
