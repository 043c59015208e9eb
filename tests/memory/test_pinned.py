"""Host memory that is registered with CUDA in slices: all of it, each page once, and nothing after `close`."""

from __future__ import annotations

from contextlib import closing
from unittest.mock import patch

import numpy as np
import pytest
import torch

from quire.engine.device.frame_staging import ComputeStream, FrameStaging
from quire.errors import HostMemoryError
from quire.memory import pinned
from quire.memory.frame_copies import FrameCopies
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.spec.group import GroupSpec
from quire.spec.layout import DType, Field, PageLayout
from tests.fake_cuda import FakeCuda


def group(numbers: int) -> GroupSpec:
    """Frames of so many numbers of four bytes."""
    return GroupSpec(
        name="g", layout=PageLayout(1, (Field(name="k", shape=(numbers,), dtype=DType.FLOAT32, layers=(0,)),))
    )


GROUPS = (group(24), group(50), group(20_000))  # records of 192, 320 and 81,920 bytes
FRAMES = (300, 7, 5)


def check_slices() -> None:
    """Every record is in one slice, and slices are no larger than they may be; nothing stays after `close`."""
    heard: list[tuple[int, int]] = []
    with FakeCuda().installed() as cuda, patch.object(pinned, "_SLICE", 1 << 14):
        with closing(HostPool(GROUPS, FRAMES, pinned=True, progress=lambda *each: heard.append(each))) as pool:
            assert pool.pinned
            for number in range(len(GROUPS)):
                rows = pool.rows(number)
                for row in rows:
                    at = row.ctypes.data
                    assert any(start <= at and at + len(row) <= stop for start, stop in cuda.registered)
            assert len(cuda.registered) > 5 and max(stop - start for start, stop in cuda.registered) <= 81_920
            total = sum(pool.rows(number).nbytes for number in range(len(GROUPS)))
        assert cuda.registered == [] and not pool.pinned
    assert heard[-1] == (total, total) and len(heard) > 5


def check_copies() -> None:
    """Records that are neighbours, but of two slices, are not one copy."""
    try:
        _copy_all()
    except RuntimeError as error:
        raise AssertionError("CUDA refuses a copy") from error


def _copy_all() -> None:
    with FakeCuda().installed() as cuda, patch.object(pinned, "_SLICE", 1 << 14):
        pool = Pool(GROUPS[0].layout, 300, device=torch.device("cuda"))
        pool.tensors[0][1].copy_(torch.arange(301 * 24.0, device="cuda").view(1, 301, 1, 24))
        frames = np.arange(1, 301, dtype=np.int32)
        with closing(HostPool(GROUPS[:1], FRAMES[:1], pinned=True)) as host:
            copies = FrameCopies([pool], host, FrameStaging(ComputeStream(pool.device)).frames, queues=True)
            copies.to_host(0, frames, frames)
            pool.tensors[0][1].zero_()
            queued = copies.to_device(0, frames, frames)
            assert queued is not None
            queued.wait()
        assert torch.equal(pool.tensors[0][1].inner[0, 1:, 0], torch.arange(24.0, 301 * 24.0).view(300, 24))
        assert cuda.noted == []


def test_every_record_is_in_one_slice() -> None:
    check_slices()


def test_no_copy_crosses_a_slice() -> None:
    check_copies()


def test_an_error_is_named_and_nothing_stays_registered() -> None:
    with FakeCuda().installed() as cuda, patch.object(pinned, "_SLICE", 1 << 14):
        cuda.most_registered = 100_000
        with pytest.raises(HostMemoryError, match="CUDA error 2, error 2 in Python") as error:
            HostPool(GROUPS, FRAMES, pinned=True)
        assert "ulimit -l" in str(error.value) and cuda.registered == []


def test_what_progress_raises_ends_the_registration() -> None:
    class Enough(Exception):
        pass

    calls = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 3:  # once while memory is touched
            raise Enough

    with FakeCuda().installed() as cuda, patch.object(pinned, "_SLICE", 1 << 14):
        with pytest.raises(Enough):
            HostPool(GROUPS, FRAMES, pinned=True, progress=stop)
        assert cuda.registered == []
