"""Reach: what a resuming request still reads."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import UnsupportedModel
from quire.prefix.reach import Full, reach_of
from quire.spec.group import ReachSpec


@pytest.mark.parametrize(
    ("resident", "resumable"),
    [("", ""), ("1", "1"), ("0", "0"), ("1101", "1100"), ("0111", "0000"), ("1111", "1111")],
)
def test_full_reach_ends_at_the_first_hole(resident: str, resumable: str) -> None:
    found = Full().resumable(np.array([page == "1" for page in resident], dtype=np.bool_))
    assert found.tolist() == [page == "1" for page in resumable]


def test_full_reach_needs_everything() -> None:
    assert Full().needed(3) == range(3)


def test_reach_comes_from_its_description() -> None:
    assert isinstance(reach_of(ReachSpec()), Full)
    with pytest.raises(UnsupportedModel, match=r"'ring'.*knows full"):
        reach_of(ReachSpec("ring"))
