"""Rows written by a Triton kernel are those of `PagedField.write`, bit for bit, and nothing else is written."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from quire.kernels.fields import PagedField
from quire.models.forward import paged_field
from tests.covering import each_of
from tests.kernels.stored_case import ENCODED, FORMATS, FRAMES, PAGE, WIDTH, pool_of
from tests.kernels.triton.triton_case import mend_bfloat16

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _rounding(monkeypatch):
    mend_bfloat16(monkeypatch)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def edges(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of every size, with ties, the ends of each format, zeros of both signs and subnormal numbers."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(count, 2, WIDTH, generator=generator) * 2.0 ** torch.randint(-20, 20, (count, 2, 1))
    special = torch.tensor([0.0, -0.0, 448.0, 464.0, 465.0, -480.0, 57344.0, 61440.0, 1e30, 6.0, 7.0, 2.5, 3.5, 5.0])
    special = torch.cat((special, 2.0 ** -torch.arange(1.0, 40.0), torch.arange(-12, 12) / 4))
    rows[0, 0, : len(special)] = special
    rows[1] = torch.arange(2 * WIDTH).view(2, WIDTH) / 16
    rows[2] = 0
    largest = torch.finfo(dtype).max
    return rows.clamp(-largest, largest).to(dtype)


@each_of("dtype", DTYPES)
@each_of("name", list(FORMATS))
def test_rows_and_scales_are_bit_equal(name, dtype):
    check_write(name, dtype)


def check_write(name: str, dtype: torch.dtype) -> None:
    """One write of every kind of number, scattered, into pools that differ in nothing before."""
    pytest.importorskip("triton")
    from quire.kernels.triton.write import write_rows

    pools = [pool_of(FORMATS[name]) for _ in range(2)]
    for pool in pools:
        for _, tensor in pool.tensors:
            tensor.view(torch.uint8).fill_(0xA5)
    rows = edges(9, dtype).transpose(0, 1).contiguous().transpose(0, 1)  # as models give them
    slots = torch.from_numpy(np.random.default_rng(1).choice((FRAMES + 1) * PAGE, 9, replace=False))
    with np.errstate(all="ignore"):
        found = write_rows(paged_field(pools[0], "k", 0), slots, rows)
    wanted = paged_field(pools[1], "k", 0).write(slots, rows)
    assert torch.equal(bits(found), bits(wanted))
    for (_, mine), (_, theirs) in zip(pools[0].tensors, pools[1].tensors, strict=True):
        assert torch.equal(bits(mine), bits(theirs))


@pytest.mark.parametrize("name", ENCODED)
def test_what_is_not_finite_is_read_as_torch_reads_it(name):
    from quire.kernels.triton.write import write_rows

    pools = [pool_of(FORMATS[name]) for _ in range(2)]
    rows = edges(4, torch.float32)
    rows[3, 0, 5], rows[3, 1, 7], rows[2, 1, 40] = torch.nan, torch.inf, -torch.inf
    slots = torch.tensor([3, 9, 4, 1])
    found = write_rows(paged_field(pools[0], "v", 0), slots, rows)
    wanted = paged_field(pools[1], "v", 0).write(slots, rows)
    assert torch.equal(found.nan_to_num(nan=12345.0), wanted.nan_to_num(nan=12345.0))


def test_rows_without_heads_and_of_odd_widths():
    from quire.kernels.triton.write import write_rows

    for shape in ((5,), (3, 20)):
        pool = torch.full((4, 3, *shape), torch.nan, dtype=torch.bfloat16)
        other = pool.clone()
        rows, slots = torch.randn(6, *shape), torch.tensor([7, 3, 11, 5, 0, 1])
        assert torch.equal(write_rows(PagedField(pool), slots, rows), PagedField(other).write(slots, rows))
        assert torch.equal(bits(pool), bits(other))


def test_rows_that_are_stored_as_they_are_cost_no_copy():
    from quire.kernels.triton.write import write_rows

    rows = torch.randn(2, 2, 8)
    assert write_rows(PagedField(torch.zeros(3, 4, 2, 8)), torch.tensor([5, 2]), rows) is rows
    assert len(write_rows(PagedField(torch.zeros(3, 4, 2, 8)), torch.zeros(0, dtype=torch.int64), rows[:0])) == 0
