"""A pool whose frames are records of a host pool: the bytes of a record are those that copies of frames store there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import UnsupportedModel
from quire.memory.frame_copies import FrameCopies
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.spec.group import GroupSpec
from quire.spec.layout import DType, Field, PageLayout

CPU = torch.device("cpu")


def layout_of(page_size: int, *fields: tuple[str, int, DType]) -> PageLayout:
    return PageLayout(
        page_size,
        tuple(Field(name=name, shape=(width,), dtype=dtype, layers=(0, 2, 3)) for name, width, dtype in fields),
    )


def hosted_pool(layout: PageLayout, host: HostPool) -> Pool:
    return Pool(layout, rows=torch.from_numpy(host.payloads(0)), reader=CPU)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_a_record_has_the_bytes_that_a_copy_of_the_frame_stores(page_size: int) -> None:
    layout = layout_of(page_size, ("latent", 12, DType.FLOAT8_E4M3), ("rope", 6, DType.BFLOAT16))
    host = HostPool([GroupSpec(name="full", layout=layout)], [3])
    hosted, pool = hosted_pool(layout, host), Pool(layout, 3)
    generator = torch.Generator().manual_seed(0)
    for (_, found), (_, tensor) in zip(hosted.tensors, pool.tensors, strict=True):
        assert found.shape == tensor.shape
        rows = torch.randint(0, 256, tensor[:, 0].view(torch.uint8).shape, generator=generator, dtype=torch.uint8)
        found.view(torch.uint8)[:, 2] = tensor.view(torch.uint8)[:, 1] = rows
    FrameCopies([pool], host).to_host(0, np.array([1], np.int32), np.array([3], np.int32))
    assert np.array_equal(host.rows(0)[2], host.rows(0)[3])
    assert host.rows(0)[2].any()
    for name in ("latent", "rope"):
        assert torch.equal(hosted.layer(name, 2)[2].view(torch.uint8), pool.layer(name, 2)[1].view(torch.uint8))
    host.close()


def test_fields_that_are_not_aligned_in_a_record_are_refused() -> None:
    layout = layout_of(1, ("latent", 5, DType.FLOAT8_E4M3), ("scales", 1, DType.FLOAT32))
    host = HostPool([GroupSpec(name="full", layout=layout)], [3])
    with pytest.raises(UnsupportedModel, match="field 'scales' begins at byte 15"):
        hosted_pool(layout, host)
    with pytest.raises(UnsupportedModel, match="field 'scales' begins at byte 15"):
        Pool(layout, 3)
    host.close()
