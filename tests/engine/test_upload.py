"""Arrays on their way to a device: one copy from pinned memory, and the numbers of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire.upload import Upload, to_device
from tests.fake_cuda import FakeCuda

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def arrays(seed: int, count: int) -> list[npt.NDArray[Any]]:
    """Of many shapes and element types, some empty and some with gaps."""
    rng = np.random.default_rng(seed)
    dtypes = (np.int32, np.int64, np.float32, np.float64, np.bool_, np.uint8, np.int16)
    found = []
    for _ in range(count):
        shape = tuple(rng.integers(0, 7, rng.integers(1, 4)))
        made = rng.integers(0, 100, shape).astype(dtypes[rng.integers(len(dtypes))])
        found.append(made[::2] if rng.random() < 0.3 else made)
    return found


def check_upload(seed: int) -> None:
    """What arrives is what was placed, in as few copies as there is room for."""
    with FakeCuda().installed() as cuda:
        given = arrays(seed, 12)
        size = sum(-(-array.nbytes // 16) * 16 for array in given)
        for room, copies in ((size, 1), (size // 2 + 64, 2), (16, len(given))):
            with cuda.watched():
                upload, before = Upload(CUDA, room), cuda.num_copies
                with upload:
                    sent = [to_device(array, CUDA) for array in given]
            assert cuda.num_copies - before == upload.num_copies <= copies
            assert room < size or upload.num_copies == 1
            for array, tensor in zip(given, sent, strict=True):
                assert tensor.device.type == "cuda" and tensor.shape == array.shape
                assert np.array_equal(tensor.cpu().numpy(), array), "an array arrived with other numbers"
                assert not tensor.numel() or tensor.storage_offset() * tensor.element_size() % 16 == 0
        assert cuda.noted == []


@pytest.mark.parametrize("seed", range(5))
def test_arrays_arrive_in_one_copy(seed: int) -> None:
    check_upload(seed)


def test_nothing_arrives_before_it_is_sent() -> None:
    with FakeCuda().installed():
        upload = Upload(CUDA, 1024)
        sent = upload.place(np.arange(5))
        assert not torch.equal(sent.cpu(), torch.arange(5))
        upload.send()
        assert torch.equal(sent.cpu(), torch.arange(5))


def test_an_error_does_not_keep_arrays_from_arriving() -> None:
    """Tensors of a step that fails may be kept for the next one: terms of sampling are."""
    with FakeCuda().installed():
        sent: list[torch.Tensor] = []

        def step() -> None:
            with Upload(CUDA, 1024):
                sent.append(to_device(np.arange(3), CUDA))
                raise ValueError("the host")

        with pytest.raises(ValueError, match="the host"):
            step()
        assert torch.equal(sent[0].cpu(), torch.arange(3))
        alone = to_device(np.arange(4), CUDA)
        assert torch.equal(alone.cpu(), torch.arange(4))


def test_the_cpu_needs_no_copy() -> None:
    array = np.arange(4)
    upload = Upload(CPU, 0)
    with upload:
        tensor = to_device(array, CPU)
    array[2] = 9
    assert tensor.tolist() == [0, 1, 9, 3] and upload.num_copies == 0
    assert upload.place(array).data_ptr() == tensor.data_ptr()
