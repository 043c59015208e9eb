"""Frames that are moved part by part: those alone are read, however many there are."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.moves import TORCH, Pieces


@pytest.mark.parametrize("part", [512, 1024, 4096])
def test_a_move_of_parts_copies_no_other_frame(part: int) -> None:
    frames = torch.arange(200 * 4096, dtype=torch.int64).view(torch.uint8)[: 200 * 4096].view(200, 4096).clone()
    expected, sources, targets = frames.clone(), torch.tensor([3, 7]), torch.tensor([150, 4])
    expected[targets] = expected[sources]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as measured:
        for at in range(0, 4096, part):
            pieces = Pieces.of([(0, frames[None, :, None, at : at + part])], part)
            TORCH.move(pieces, sources, targets)
    assert torch.equal(frames, expected)
    most = max(event.self_cpu_memory_usage for event in measured.key_averages() if event.count)
    assert 2 * part <= most <= 4 * 4096, "a few frames, not all"
