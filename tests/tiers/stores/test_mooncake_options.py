"""MooncakeStore without a master: its URLs, and how its lanes hold batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.errors import InvalidInput
from quire.testing.contracts.records import make_keys
from quire.tiers.store import Answer
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


class FakeClient:
    """A pool that takes everything, and notes where in the registered memory the records of each call are."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int]]] = []
        self.start = self.num_bytes = 0

    def register_buffer(self, address: int, num_bytes: int) -> int:
        self.start, self.num_bytes = address, num_bytes
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [0] * len(names)

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int], _: object) -> list[int]:
        assert len(names) == len(addresses) == len(sizes)
        self.calls.append([(at - self.start, size) for at, size in zip(addresses, sizes, strict=True)])
        return [0] * len(names)


@pytest.mark.parametrize(
    ("most", "most_bytes", "batches"),
    [(9, 200, [[0], [1], [2], [4], [5, 6, 7]]), (3, 1 << 30, [[0], [1, 2], [4, 5, 6], [7]])],
)
def test_lanes_hold_their_batches(
    monkeypatch: pytest.MonkeyPatch, most: int, most_bytes: int, batches: list[list[int]]
) -> None:
    """Batches are as large as a lane and a call allow, in order, and what never fits is in none."""
    monkeypatch.setattr(mooncake_store, "_MOST_PIECES", most)
    monkeypatch.setattr(mooncake_store, "_BATCH_BYTES", most_bytes)
    client = FakeClient()
    replication = SimpleNamespace(replica_num=1)
    store = mooncake_store.MooncakeStore(client, replication, "here", bounce_bytes=(1 << 20) + 1, listing="")
    assert client.num_bytes == 1 << 20
    lane_bytes = client.num_bytes // 2
    sizes = [lane_bytes, 100, 65, lane_bytes + 1, lane_bytes - 200, 64, 64, 64]
    keys = make_keys(len(sizes))
    assert store.prepare(keys, sizes) == [Answer.RETRY if size > lane_bytes else Answer.MISS for size in sizes]
    answers = [Answer.RETRY if size > lane_bytes else Answer.HIT for size in sizes]
    assert store.put(keys, [bytes(size) for size in sizes]) == answers
    assert store.complete(keys, [True] * 8) == [Answer.MISS if size > lane_bytes else Answer.HIT for size in sizes]
    assert [[size for _, size in call] for call in client.calls] == [[sizes[at] for at in batch] for batch in batches]
    for call in client.calls:
        ends = [place + size for place, size in call]
        assert all(end <= start for end, (start, _) in zip(ends, call[1:], strict=False))
        assert call[0][0] // lane_bytes == (ends[-1] - 1) // lane_bytes, "in one lane"
