"""StateBatch: which pieces run together, and in which order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.moves import TORCH
from quire.kernels.state import StateBatch, StateRun

CPU = torch.device("cpu")


def batch(*pieces: tuple[int, int, int]) -> StateBatch:
    """Of pieces (rows, source, target)."""
    lengths, sources, targets = zip(*pieces, strict=True)
    starts = np.cumsum([0, *lengths])
    return StateBatch(*(np.array(numbers, dtype=np.int32) for numbers in (starts, sources, targets)))


def rows_of(run: StateRun) -> list[int]:
    return torch.arange(100)[run.rows].tolist()


def described(found: StateBatch) -> list[tuple[list[int], int, list[int], list[int]]]:
    return [(rows_of(run), run.length, run.sources.tolist(), run.targets.tolist()) for run in found.runs(CPU)]


def test_single_rows_run_together_and_longer_pieces_alone():
    found = batch((1, 4, 4), (3, 0, 2), (1, 7, 7), (2, 5, 5), (1, 3, 6))
    assert described(found) == [
        ([0, 4, 7], 1, [4, 7, 3], [4, 7, 6]),
        ([1, 2, 3], 3, [0], [2]),
        ([5, 6], 2, [5], [5]),
    ]


def test_consecutive_rows_are_a_slice():
    runs = batch((2, 0, 1), (1, 2, 2), (1, 3, 3)).runs(CPU)
    assert [run.rows for run in runs] == [slice(2, 4), slice(0, 2)]


def test_a_piece_waits_for_the_state_it_begins_with():
    found = batch((4, 0, 1), (1, 1, 2), (1, 2, 3), (5, 3, 3), (1, 9, 9), (2, 0, 4), (1, 4, 4))
    assert described(found) == [
        ([11], 1, [9], [9]),
        ([0, 1, 2, 3], 4, [0], [1]),
        ([12, 13], 2, [0], [4]),
        ([4, 14], 1, [1, 4], [2, 4]),
        ([5], 1, [2], [3]),
        ([6, 7, 8, 9, 10], 5, [3], [3]),
    ]


def test_sequences_that_begin_from_one_frame_do_not_wait():
    assert [rows for rows, *_ in described(batch((1, 5, 1), (1, 5, 2), (1, 0, 3)))] == [[0, 1, 2]]


def test_runs_are_planned_once():
    found = batch((1, 1, 1))
    assert found.runs(CPU) is found.runs(CPU)


@pytest.mark.parametrize("pieces", [((0, 1, 1),), ((2, 0, 0),)])
def test_pieces_have_rows_and_a_place_for_their_state(pieces):
    with pytest.raises(AssertionError):
        batch(*pieces)


def test_reading_and_writing():
    pool = torch.full((5, 1, 2, 3), torch.nan, dtype=torch.bfloat16)
    TORCH.write_states(pool, torch.tensor([3, 1]), torch.arange(12.0).view(2, 2, 3))
    read = TORCH.read_states(pool, torch.tensor([1, 0, 3]))
    assert read.tolist() == [
        [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]],
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
    ]
    read.fill_(7.0)
    assert pool[1, 0, 0, 0] == 6.0, "what is read is a copy"
    assert torch.isnan(pool[[0, 2, 4]]).all()
