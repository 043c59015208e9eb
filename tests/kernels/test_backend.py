"""What computes attention is chosen by device, demanded by name, refused by name, and named to people."""

from __future__ import annotations

import pytest
import torch

from quire.errors import InvalidInput
from quire.kernels import backend
from quire.kernels.backend import AttentionBackend

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A device as torch would describe it, and whether triton and a compiler are installed."""

    def describe(capability=(9, 0), triton=True, compiler=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        monkeypatch.setattr(backend, "find_spec", lambda name: object() if triton and name == "triton" else None)
        monkeypatch.setattr(
            backend.shutil, "which", lambda name: "/usr/bin/gcc" if compiler and name == "gcc" else None
        )
        monkeypatch.delenv("CC", raising=False)

    return describe


def test_cuda_has_triton_kernels(gpu):
    gpu()
    for word in ("auto", "triton"):
        found = AttentionBackend(word, CUDA)
        found.check()
        assert found.about() == "Triton kernels, compiled for NVIDIA H200 when they are first used"


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ({"triton": False}, "triton is not installed"),
        ({"capability": (7, 5)}, "NVIDIA H200 has 7.5"),
        ({"compiler": False}, "needs a C compiler"),
    ],
)
def test_without_them_auto_is_torch_and_a_demand_is_refused(gpu, device, reason):
    gpu(**device)
    auto = AttentionBackend("auto", CUDA)
    auto.check()
    assert auto.about().startswith("torch's operators; ")
    assert reason in auto.about()
    with pytest.raises(InvalidInput, match=f"attention by triton kernels is not possible: .*{reason}"):
        AttentionBackend("triton", CUDA).check()


def test_the_cpu_has_no_triton_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InvalidInput, match=r"triton is not installed|the device is cpu"):
        AttentionBackend("triton").check()
    assert "riton" not in AttentionBackend("auto").about()


def test_the_native_kernel_is_refused_on_cuda():
    with pytest.raises(InvalidInput, match=r"attention by native kernels is not possible: .* the device is cuda:0"):
        AttentionBackend("native", CUDA).check()
