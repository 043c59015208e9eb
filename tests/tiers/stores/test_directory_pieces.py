"""Records in several pieces come back whole, wherever the pieces of writer and reader lie in memory."""

from __future__ import annotations

import mmap
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from quire.tiers.store import Answer, StoreKey
from quire.tiers.stores.directory import DirectoryStore

BLOCK = 4096
SIZES = (1, 64, 100, 4095, 4096, 4097, 3 * 4096, 70_000, 256 << 10, (1 << 20) + 5)


def pieces(draw: random.Random, total: int) -> tuple[memoryview, ...]:
    """Memory of so many bytes in pieces, some on block boundaries."""
    found, left = [], total
    while left:
        size = min(left, draw.choice(SIZES))
        shift = draw.choice((0, 0, 1, 64))
        found.append(memoryview(mmap.mmap(-1, size + shift))[shift:])
        left -= size
    return tuple(found)


@pytest.mark.parametrize("direct", [True, False])
def test_pieces_of_any_size_and_place(direct: bool, tmp_path: Path) -> None:
    draw, content = random.Random(7), np.random.default_rng(7)
    with closing(DirectoryStore(tmp_path, 256 << 20, direct=direct)) as store:
        for turn in range(40):
            totals = [sum(draw.choices(SIZES, k=draw.randint(1, 5))) for _ in range(draw.randint(1, 6))]
            keys = [StoreKey(bytes(16), content.bytes(32), 0) for _ in totals]
            records = [content.bytes(total) for total in totals]
            written = [pieces(draw, total) for total in totals]
            for views, record in zip(written, records, strict=True):
                fill(views, record)
            assert store.prepare(keys, totals) == [Answer.MISS] * len(keys)
            assert store.put(keys, written) == [Answer.HIT] * len(keys)
            assert store.complete(keys, [True] * len(keys)) == [Answer.HIT] * len(keys)
            read = [pieces(draw, total) for total in totals]
            assert store.get(keys, read) == [Answer.HIT] * len(keys)
            assert [b"".join(views) for views in read] == records, f"turn {turn}"


def fill(views: tuple[memoryview, ...], record: bytes) -> None:
    at = 0
    for view in views:
        view[:] = record[at : at + len(view)]
        at += len(view)


def test_nothing_else_lies_after_a_record(tmp_path: Path) -> None:
    """The rest of its last block is zeros, not bytes of another record that passed through the same buffer."""
    with closing(DirectoryStore(tmp_path, 64 << 20, direct=False, threads=1)) as store:
        for record in (bytes([255]) * 3000, bytes([1]) * 100, (bytes([2]) * 5000, bytes([3]) * 10)):
            key = [StoreKey(bytes(16), random.randbytes(32), 0)]
            size = sum(map(len, record)) if isinstance(record, tuple) else len(record)
            assert store.prepare(key, [size]) == [Answer.MISS] and store.put(key, [record]) == [Answer.HIT]
            store.complete(key, [True])
    blocks = [block for slab in (tmp_path / "slabs").iterdir() for block in _blocks(slab.read_bytes())]
    assert all(len(set(block.rstrip(b"\0"))) <= 2 and block.count(255) in (0, 3000) for block in blocks)


def _blocks(data: bytes) -> list[bytes]:
    return [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("count", "sizes"), [(2000, [4096]), (3000, [100]), (600, [4096, 100]), (240, [4096, 100])])
def test_many_pieces(direct: bool, count: int, sizes: list[int], tmp_path: Path) -> None:
    """More than the system takes in one call, in one record or in neighbours."""
    total = count * sum(sizes)
    with closing(DirectoryStore(tmp_path, 128 << 20, direct=direct)) as store:
        content = np.random.default_rng(3).bytes(4 * total)
        keys = [StoreKey(bytes(16), bytes([at]) * 32, 0) for at in range(4)]
        written, read = ([cut(memoryview(mmap.mmap(-1, total)), sizes) for _ in keys] for _ in range(2))
        for at, views in enumerate(written):
            fill(views, content[at * total : (at + 1) * total])
        assert store.prepare(keys, [total] * 4) == [Answer.MISS] * 4
        assert store.put(keys, written) == [Answer.HIT] * 4
        assert store.complete(keys, [True] * 4) == [Answer.HIT] * 4
        assert store.get(keys, read) == [Answer.HIT] * 4
        assert b"".join(view for views in read for view in views) == content


def cut(memory: memoryview, sizes: list[int]) -> tuple[memoryview, ...]:
    """Pieces of these sizes, one after another, again and again."""
    found = []
    while memory:
        for size in sizes:
            found.append(memory[:size])
            memory = memory[size:]
    return tuple(found)
