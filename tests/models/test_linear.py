"""Widened linear layers against the narrow ones they stand for."""

from __future__ import annotations

import copy

import pytest
import torch

from quire.models import linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_layer_computes_what_the_narrow_one_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same element type out, the same values to one rounding of it, and more bytes, which the model then reports."""
    monkeypatch.setattr(linear, "native_on_cpu", lambda _: False)
    torch.manual_seed(0)
    narrow = torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.Linear(96, 32, bias=False)).to(dtype)
    wide = copy.deepcopy(narrow)
    assert linear.prepare_linears(wide) == 2
    rows = torch.randn(7, 48, dtype=dtype)
    expected, got = narrow(rows), wide(rows)
    assert got.dtype == dtype
    assert torch.allclose(got.float(), expected.float(), atol=0.02, rtol=0.02)
    assert sum(p.nbytes for p in wide.parameters()) == 2 * sum(p.nbytes for p in narrow.parameters())


def test_float32_is_left_alone() -> None:
    """Nothing to widen."""
    assert linear.prepare_linears(torch.nn.Linear(4, 4)) == 0
    assert linear.native_on_cpu(torch.float32)
