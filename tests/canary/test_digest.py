"""Digests of frames: any change shows, in any layout, and marks go with the first write."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.canary.digest import FrameDigests
from quire.memory.pool import Pool
from quire.spec.layout import DType, Field, PageLayout

LAYOUTS = {
    "words": (Field(name="k", shape=(2, 8), dtype=DType.FLOAT32, layers=(0, 1, 2)),),
    "half": (Field(name="k", shape=(3,), dtype=DType.BFLOAT16, layers=(0, 1)),),
    "bytes": (Field(name="k", shape=(5,), dtype=DType.UINT8, layers=(0,)),),
    "scales": (
        Field(name="k", shape=(16,), dtype=DType.UINT8, layers=(0, 1)),
        Field(name="k_scale", shape=(2,), dtype=DType.UINT8, layers=(0, 1)),
    ),
    "compressed": (Field(name="c", shape=(4,), dtype=DType.FLOAT32, layers=(0, 1), per=4),),
    "state": (Field(name="s", shape=(3, 7), dtype=DType.FLOAT32, layers=(0, 1), per=0),),
}


def pool_of(name: str, device: str = "cpu") -> Pool:
    pool = Pool(PageLayout(8, LAYOUTS[name]), 9, device=device)
    generator = torch.Generator().manual_seed(1)
    pool.rows.copy_(torch.randint(0, 256, pool.rows.shape, dtype=torch.uint8, generator=generator))
    return pool


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_bit_of_a_frame_is_in_its_digest(name: str) -> None:
    pool = pool_of(name)
    digests = FrameDigests(pool)
    frames = np.arange(1, 10, dtype=np.int32)
    assert digests.bytes_per_frame == pool.layout.bytes_per_frame
    before = digests.read(frames).numpy()[0].copy()
    assert len(set(before.tolist())) == 9
    for _, tensor in pool.tensors:
        own = tensor[:, 4]
        for layer in own:
            flat = layer.reshape(-1).view(torch.uint8)
            assert flat.data_ptr() == layer.data_ptr()
            for at in range(len(flat)):
                flat[at] ^= 1 << at % 8
                after = digests.read(frames).numpy()[0]
                assert (after != before).tolist() == [frame == 4 for frame in range(1, 10)]
                flat[at] ^= 1 << at % 8
    assert digests.read(frames).numpy()[0].tolist() == before.tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_scattered_frames_and_runs_have_the_same_digests(name: str) -> None:
    digests = FrameDigests(pool_of(name))
    run = digests.read(np.arange(1, 10, dtype=np.int32)).numpy()[0]
    for order in ([9, 1, 5], [3], [4, 5], [5, 4], [2, 4, 3]):
        assert digests.read(np.array(order, dtype=np.int32)).numpy()[0].tolist() == [run[frame - 1] for frame in order]


def test_layers_of_drafts_are_left_out() -> None:
    pool = pool_of("words")
    digests, frames = FrameDigests(pool, except_for=[2]), np.arange(1, 10, dtype=np.int32)
    before = digests.read(frames).numpy()[0].copy()
    pool.tensors[0][1][2] += 1
    assert digests.read(frames).numpy()[0].tolist() == before.tolist()
    pool.tensors[0][1][1] += 1
    assert not set(digests.read(frames).numpy()[0].tolist()) & set(before.tolist())


def test_marks_go_where_entries_are_written() -> None:
    pool = pool_of("words")
    digests, frames = FrameDigests(pool), np.array([2, 7], dtype=np.int32)
    digests.mark(frames)
    assert digests.read(np.array([7, 3, 2], dtype=np.int32)).numpy()[1].tolist() == [24, 0, 24]
    pool.tensors[0][1][:, 2, 3] = 0.5
    pool.tensors[0][1][1, 7, 0] = 0.5
    assert digests.read(frames).numpy()[1].tolist() == [21, 23]


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gpu_has_the_same_digests(name: str) -> None:
    frames = np.array([1, 2, 3, 8, 5], dtype=np.int32)
    here, there = FrameDigests(pool_of(name)), FrameDigests(pool_of(name, "cuda"))
    for digests in (here, there):
        digests.mark(np.array([5], dtype=np.int32))
    reading = there.read(frames)
    torch.cuda.synchronize()
    assert reading.ready and reading.seconds > 0
    for mine, theirs in zip(here.read(frames).numpy(), reading.numpy(), strict=True):
        assert mine.tolist() == theirs.tolist()
