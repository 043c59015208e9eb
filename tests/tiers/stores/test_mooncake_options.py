"""MooncakeStore without a master: its URLs, and how its lanes hold batches."""

from __future__ import annotations

import pytest

from quire.errors import InvalidInput
from quire.tiers.stores import mooncake as mooncake_store


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("mooncake://", "looks like"),
        ("http://host", "looks like"),
        ("mooncake://host?colour=red", "no option 'colour'"),
        ("mooncake://host?segment=much", "a size like"),
        ("mooncake://host?bounce=1mib", "a size like"),
    ],
)
def test_urls_that_say_nothing(wrong: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        mooncake_store.open(wrong)


def test_two_sizes() -> None:
    with pytest.raises(InvalidInput, match="say one of them"):
        mooncake_store.open("mooncake://host?segment=1GiB", 1 << 30)


def test_lanes_hold_their_batches() -> None:
    """Batches are as large as a lane and a call allow, in order, and what never fits is in none."""
    bounce = mooncake_store.Bounce(1 << 20, 2)
    assert bounce.lane_bytes == 1 << 19
    sizes = [1 << 19, 100, 65, (1 << 19) + 1, (1 << 19) - 200, 64, 64, 64]
    assert list(bounce.batches(sizes, 9, 200)) == [[0], [1], [2], [4], [5, 6, 7]]
    batches = list(bounce.batches(sizes, 3, 1 << 30))
    assert batches == [[0], [1, 2], [4, 5, 6], [7]]
    with bounce.lane() as lane:
        for batch in batches:
            places = lane.places([sizes[index] for index in batch])
            ends = [place + sizes[index] for place, index in zip(places, batch, strict=True)]
            assert all(end <= start for end, start in zip(ends, places[1:], strict=False))
            assert ends[-1] <= lane.memory.nbytes
