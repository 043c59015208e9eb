"""Scratch tensors that are kept between calls, on a CPU."""

from __future__ import annotations

import torch

from quire.kernels.workspace import Workspace
from tests.fake_cuda import DEVICE, FakeCuda


def test_scratch_memory_is_kept_on_a_cpu_alone() -> None:
    """On a GPU a graph would go on to use what a larger one replaced."""
    workspace, cpu = Workspace(), torch.device("cpu")
    kept = workspace.take("rows", torch.float32, cpu, 4, 2)
    assert workspace.take("rows", torch.float32, cpu, 3).data_ptr() == kept.data_ptr()
    with FakeCuda().installed():
        first = workspace.take("rows", torch.float32, DEVICE, 4, 2)
        second = workspace.take("rows", torch.float32, DEVICE, 1 << 20)
        assert first.shape == (4, 2) and first.data_ptr() != second.data_ptr()
        assert {device.type for _, _, device in workspace._buffers} == {"cpu"}
