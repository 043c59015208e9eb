"""What is read from a device before an engine is there: its free memory, and what a step takes."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import PropertyMock, patch

import pytest
import torch

from quire.engine.device import measure
from quire.engine.device.device import free_bytes
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.moves import Moves
from quire.kernels.state import StateBatch
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel
from tests.emulated_attention import emulated_kernels
from tests.engine.test_fake_cuda import on_device
from tests.fake_cuda import DEVICE, FakeCuda


class MovesOfBackend(Moves):
    """Those of a backend; batches have others by default."""


def test_what_torch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are loaded through tensors that are gone, and torch keeps their memory."""
    free = [1 << 29]
    with FakeCuda().installed():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[0], 1 << 30))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(free.pop() + (1 << 28)))
        assert free_bytes(DEVICE) == int(0.8 * 3 * (1 << 28))


def test_a_measured_step_is_computed_as_one_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels of the device; torch's operators take other memory."""
    ran: list[PagedBatch | StateBatch] = []

    def peak(device: torch.device, work: Callable[[], object]) -> int:
        work()
        return 0

    def run(model: LoadedModel, running: RunningForward, *given: torch.Tensor) -> torch.Tensor:
        ran.extend(running.batches)
        return real(model, running, *given)

    real, moves = LoadedModel.run, MovesOfBackend()
    monkeypatch.setattr(LoadedModel, "run", run)
    monkeypatch.setattr(measure, "_peak_bytes", peak)  # the device in Python does not count memory
    own_moves = patch.object(AttentionBackend, "moves", PropertyMock(return_value=moves))
    with FakeCuda().installed(), emulated_kernels(), own_moves:
        measure._step_bytes(on_device("bamba"), 20)
    paged = next(batch for batch in ran if isinstance(batch, PagedBatch))
    states = next(batch for batch in ran if isinstance(batch, StateBatch))
    assert set(paged.backend.calls) == {"triton"} and not paged.backend.fallbacks
    assert states.moves is moves
