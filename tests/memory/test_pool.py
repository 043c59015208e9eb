"""The pool: tensors from a layout, one class for all kinds."""

from __future__ import annotations

import psutil
import pytest
import torch

from quire.errors import PlanError
from quire.memory.pool import Pool, torch_dtype
from quire.spec.layout import PER_PAGE, DType, Field, PageLayout

LAYOUT = PageLayout(
    4,
    (
        Field(name="k", shape=(2, 3), dtype=DType.BFLOAT16, layers=(0, 2)),
        Field(name="k", shape=(1, 5), dtype=DType.BFLOAT16, layers=(1,)),
        Field(name="scale", shape=(), dtype=DType.FLOAT32, layers=(0, 1, 2), per=2),
        Field(name="state", shape=(8,), dtype=DType.UINT8, layers=(0,), per=PER_PAGE),
    ),
)


def test_shapes_follow_the_layout_with_frame_zero_on_top() -> None:
    pool = Pool(LAYOUT, 3)
    assert pool.layer("k", 0).shape == pool.layer("k", 2).shape == (4, 4, 2, 3)
    assert pool.layer("k", 1).shape == (4, 4, 1, 5)
    assert pool.layer("scale", 1).shape == (4, 2)
    assert pool.layer("state", 0).shape == (4, 1, 8)
    assert pool.layer("k", 0).dtype is torch.bfloat16


def test_the_bytes_are_the_layouts_bytes() -> None:
    assert Pool(LAYOUT, 3).num_bytes == 4 * LAYOUT.bytes_per_frame


def test_a_pool_that_is_in_use_is_populated_as_it_is() -> None:
    layout = PageLayout(4, (Field(name="k", shape=(1024,), dtype=DType.FLOAT32, layers=(0,)),))
    pool = Pool(layout, 2047, touched=False)  # 32 MiB
    process = psutil.Process()
    before = process.memory_info().rss
    pool.layer("k", 0)[1000] = 3.0
    assert process.memory_info().rss - before < pool.num_bytes // 2
    assert len(list(pool.backing.populate())) == 2
    assert process.memory_info().rss - before > pool.num_bytes - 2**20
    assert pool.layer("k", 0)[1000].eq(3.0).all() and pool.layer("k", 0).count_nonzero() == 4096


def test_layers_are_views_that_do_not_overlap() -> None:
    pool = Pool(LAYOUT, 3)
    pool.layer("k", 2)[1, 0] = 1
    assert pool.layer("k", 2)[1, 0].eq(1).all()
    assert not pool.layer("k", 0).any()
    assert not pool.layer("k", 1).any()


def test_a_layer_without_the_field_is_known() -> None:
    pool = Pool(LAYOUT, 1)
    assert pool.has("scale", 2)
    assert not pool.has("state", 1)


@pytest.mark.parametrize("dtype", list(DType))
def test_every_element_type_has_its_size(dtype: DType) -> None:
    assert torch.empty(1, dtype=torch_dtype(dtype)).element_size() == dtype.itemsize


def test_a_pool_that_cannot_be_allocated_says_so() -> None:
    huge = PageLayout(1, (Field(name="k", shape=(2**40,), dtype=DType.FLOAT32, layers=(0,)),))
    with pytest.raises(PlanError, match="lower the KV memory"):
        Pool(huge, 2**10)


def test_the_memory_of_a_large_pool_is_there_from_the_start() -> None:
    """On the CPU, too, a pool fails when it is built or not at all."""
    layout = PageLayout(16, (Field(name="k", shape=(64, 64), dtype=DType.BFLOAT16, layers=(0, 1)),))
    before = psutil.Process().memory_info().rss
    pool = Pool(layout, 511)
    assert pool.num_bytes == 128 * 2**20
    assert psutil.Process().memory_info().rss - before > 120 * 2**20
    assert not pool.layer("k", 1).any()
