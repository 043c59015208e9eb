"""Moves by Triton kernels, by the interpreter: bit for bit those of torch's operators, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.backend import AttentionBackend
from quire.kernels.moves import TORCH, HostEntries, Moves, Pieces
from tests.kernels.triton.triton_case import mend_bfloat16

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = (((2, 48), (3, 16)), ((1, 13), (2, 7), (1, 1)), ((2, 8 * 1500), (1, 24)), ((4, 32), (4, 2048)), ((1, 40),))
"""Layers and bytes of each field: aligned to 16 bytes, to none, to 8 and of several programs."""


def interpreted() -> Moves:
    pytest.importorskip("triton")
    return AttentionBackend("triton").moves


def random_bytes(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))


def pieces_of(rng: np.random.Generator, shapes: Any, num_frames: int, entries: int) -> Pieces:
    """Fields of a pool, whose frames are one piece, in a record with a header, a gap between fields and one behind
    them."""
    step = 16 if all(size % 16 == 0 for _, size in shapes) else 8 if all(size % 8 == 0 for _, size in shapes) else 1
    place, fields = step, []
    for layers, size in shapes:
        frames = random_bytes(rng, num_frames, step + layers * entries * size)[:, step:]
        fields.append((place, frames.view(num_frames, layers, entries, size).transpose(0, 1)))
        place += layers * size + step
    return Pieces.of(fields, place + step)


def copied(pieces: Pieces) -> Pieces:
    return Pieces([(place, part.clone()) for place, part in pieces.parts], pieces.record_words)


def same(mine: Pieces, theirs: Pieces) -> bool:
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(mine.parts, theirs.parts, strict=True))


def check_moves(seed: int) -> None:
    """There, back and from row to row, of the rows of a pool in any order."""
    moves, rng = interpreted(), np.random.default_rng(seed)
    shapes, entries = SHAPES[seed % len(SHAPES)], (1, 4)[seed // len(SHAPES) % 2]
    num_rows = 20
    mine = pieces_of(rng, shapes, num_rows // entries, entries)
    theirs, before = copied(mine), copied(mine)
    count = int(rng.integers(1, 7))
    rows = torch.from_numpy(rng.permutation(num_rows)[:count])
    word = mine.word
    records = random_bytes(rng, count, mine.record_words * word.itemsize).view(word)
    others = records.clone()
    moves.gather(mine, rows, records)
    TORCH.gather(theirs, rows, others)
    assert torch.equal(records, others) and same(mine, before)
    records = random_bytes(rng, count, mine.record_words * word.itemsize).view(word)
    others = records.clone()
    moves.scatter(mine, rows, records)
    TORCH.scatter(theirs, rows, records)
    assert torch.equal(records, others) and same(mine, theirs) and not same(mine, before)
    sources, targets = (torch.from_numpy(rng.permutation(8)[:6]) for _ in range(2))  # some are both
    moves.move(mine, sources, targets)
    TORCH.move(theirs, sources, targets)
    assert same(mine, theirs)


@pytest.mark.parametrize("seed", range(2 * len(SHAPES)))
def test_pieces_move_as_torch_moves_them(seed: int) -> None:
    check_moves(seed)


def test_no_rows_are_no_launch() -> None:
    mine = pieces_of(np.random.default_rng(1), SHAPES[0], 3, 1)
    nothing = torch.empty(0, dtype=torch.int64)
    before, moves = copied(mine), interpreted()
    moves.gather(mine, nothing, torch.empty(0, mine.record_words, dtype=mine.word))
    moves.move(mine, nothing, nothing)
    entries = entries_of(np.random.default_rng(1), SHAPES[0], 4)
    moves.swap_in(entries, np.empty(0, np.int64), np.empty(0, np.int64), nothing)
    assert same(mine, before)


def entries_of(rng: np.random.Generator, shapes: Any, page: int) -> HostEntries:
    """Entries of records in host memory, which have a header, and slots of a hot pool."""
    sizes = [size for _, size in shapes]
    header = 16 if all(size % 16 == 0 for size in sizes) else 8 if all(size % 8 == 0 for size in sizes) else 3
    stride = header + page * sum(sizes)
    stride += -stride % 16 if header == 16 else header
    records, frames, place, parts = random_bytes(rng, 9, stride), random_bytes(rng, 5, stride), header, []
    for size in sizes:
        both = (each[:, place : place + page * size] for each in (records, frames))
        host, hot = (each.view(len(each), page, 1, size) for each in both)
        parts.append((host, hot))
        place += page * size
    return HostEntries(parts)


def check_swap_in(seed: int) -> None:
    """Tokens of any pages, to any slots of a hot pool."""
    moves, rng = interpreted(), np.random.default_rng(seed)
    shapes, page = SHAPES[seed % len(SHAPES)], int(rng.choice([1, 4, 16]))
    mine = entries_of(rng, shapes, page)
    theirs = HostEntries([(source, target.clone()) for source, target in mine.parts])
    hosts = [source.clone() for source, _ in mine.parts]
    count = min(5 * page, 11)
    frames, places = rng.integers(0, 9, count), rng.integers(0, page, count)
    targets = torch.from_numpy(rng.permutation(5 * page)[:count])
    for each, own in ((moves, mine), (TORCH, theirs)):
        each.swap_in(own, frames, places, targets)
    for (source, target), (_, other), host in zip(mine.parts, theirs.parts, hosts, strict=True):
        assert torch.equal(target, other) and torch.equal(source, host)


@pytest.mark.parametrize("seed", range(2 * len(SHAPES)))
def test_tokens_are_swapped_in_as_torch_does(seed: int) -> None:
    check_swap_in(seed)


def test_words_are_as_wide_as_sizes_allow() -> None:
    rng = np.random.default_rng(1)
    found = [pieces_of(rng, shapes, 3, 1) for shapes in SHAPES]
    assert [(each.word.itemsize, each.is_aligned) for each in found] == [
        (8, True),
        (1, False),
        (8, False),
        (8, True),
        (8, False),
    ]
    assert [(each.word.itemsize, each.is_aligned) for each in (entries_of(rng, s, 4) for s in SHAPES)] == [
        (8, True),
        (1, False),
        (8, False),
        (8, True),
        (8, False),
    ]


STATES = (((2, 3, 5), torch.float32, None), ((4, 700), torch.bfloat16, torch.float32), ((9, 3), torch.bfloat16, None))
STATES += (((40,), torch.float16, torch.float32),)


def check_states(shape: tuple[int, ...], stored: torch.dtype, asked: torch.dtype | None) -> None:
    """Frames of a layer of a pool that has more, which were never written: NaN."""
    moves, generator = interpreted(), torch.Generator().manual_seed(1)
    pools = [torch.full((3, 9, 1, *shape), torch.nan, dtype=stored) for _ in range(2)]
    states = torch.randn(4, *shape, generator=generator, dtype=asked or torch.float32)
    states = states.to(asked or stored).transpose(0, 1).contiguous().transpose(0, 1)  # as models compute them
    targets, sources = torch.tensor([7, 2, 5, 1]), torch.tensor([5, 0, 1, 7, 0])
    for each, pool in zip((moves, TORCH), pools, strict=True):
        each.write_states(pool[1], targets, states)
    assert torch.equal(*(pool.contiguous().view(torch.uint8) for pool in pools))
    found, wanted = (
        each.read_states(pool[1], sources, asked) for each, pool in zip((moves, TORCH), pools, strict=True)
    )
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    assert found[0].any() and not found[1].any()
    found.fill_(3.0)
    assert torch.equal(pools[0][1, 5].view(torch.uint8), pools[1][1, 5].view(torch.uint8)), "what is read is a copy"


@pytest.mark.parametrize("case", STATES, ids=str)
def test_states_are_read_and_written_as_torch_does(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    mend_bfloat16(monkeypatch)
    check_states(*case)
