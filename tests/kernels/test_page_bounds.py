"""Bounds of pages and the pages that rows select by them; attention to selected tokens with several KV heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import UnsupportedModel
from quire.kernels import page_bounds
from quire.kernels.attention import attend_selected
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVFields, PagedField
from quire.kernels.page_bounds import PageBounds
from quire.kernels.terms import AttentionTerms
from tests.changes import KERNELS, slow_unless_changed
from tests.covering import each_of
from tests.kernels.bounds_case import check_bounds, limits_of


@slow_unless_changed(*KERNELS, "src/quire/sparse/")
@each_of("seed", range(40))
def test_bounds_are_those_of_all_keys_of_a_page(seed: int) -> None:
    check_bounds(seed)


def test_no_product_is_above_its_limit() -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(4, 8), torch.randn(16, 2, 8)
    products = torch.einsum("hgd,nhd->hgn", query.view(2, 2, 8), keys)
    assert (products.flatten(0, 1).amax(1) <= torch.tensor(limits_of(query, keys))).all()


def test_many_pages_are_scored_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    low, high = torch.randn(2, 30, 2, 8).sort(dim=0).values
    bounds = PageBounds(low, high)
    contexts = np.array([40, 5, 33, 17, 36])
    frames = np.random.default_rng(0).integers(1, 30, (5, 10)).astype(np.int32)
    query = torch.randn(5, 4, 8)
    found = [bounds.select(query, PagedBatch.of(frames, contexts - 1, contexts, 4), 3, 0.4)]
    monkeypatch.setattr(page_bounds, "_MOST_BOUNDS", 20)
    found.append(bounds.select(query, PagedBatch.of(frames, contexts - 1, contexts, 4), 3, 0.4))
    assert torch.equal(*found)


def test_drafts_that_branch_are_refused() -> None:
    frames = np.array([[1]], dtype=np.int32)
    parents = np.array([-1, 0, 0], dtype=np.int32)
    batch = PagedBatch.of(frames, np.array([0]), np.array([3]), 4, parents)
    with pytest.raises(UnsupportedModel, match="selected pages"):
        PageBounds(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)).write(batch, torch.zeros(3, 1, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "group", "value_dim"), [(1, 3, 8), (2, 2, 8), (3, 1, 5)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_rows_with_several_kv_heads_read_selected_tokens(
    dtype: torch.dtype, kv_heads: int, group: int, value_dim: int, softcap: float | None
) -> None:
    torch.manual_seed(0)
    key = torch.randn(5, 4, kv_heads, 8).to(dtype)
    value = torch.randn(5, 4, kv_heads, value_dim).to(dtype)
    query = torch.randn(3, kv_heads * group, 8).to(dtype)
    slots = torch.stack([torch.randperm(20)[:6] for _ in range(3)])
    hidden = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    fields = KVFields(PagedField(key), PagedField(value))
    out, lse = attend_selected(query, fields, slots, hidden, AttentionTerms(scale=0.3, softcap=softcap))
    for row in range(3):
        seen = slots[row][~hidden[row]]
        for head in range(kv_heads * group):
            keys = key.flatten(0, 1)[seen, head // group].double()
            scores = keys @ query[row, head].double() * 0.3
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            wanted = scores.softmax(0) @ value.flatten(0, 1)[seen, head // group].double()
            tolerance = 1e-5 if dtype is torch.float32 else 3e-2
            torch.testing.assert_close(out[row, head].double(), wanted, atol=tolerance, rtol=tolerance)
            assert abs(lse[row, head].item() - scores.logsumexp(0).item()) < tolerance
