"""Native products of a few rows with weights that oneDNN packs, against plain ones."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.native.library import native, use_native
from quire.kernels.native.products import NativeProduct, native_products

SHAPES = ((256, 512), (70, 100), (704, 256), (512, 2048))
needs_library = pytest.mark.skipif(native().library is None, reason=native().reason)
DTYPES = [torch.float32] + [torch.bfloat16] * torch.ops.mkldnn._is_mkldnn_bf16_supported()


def check_products(dtype: torch.dtype, inputs: int, outputs: int, threads: int = 1) -> None:
    """One of the widths is the layout; a row has the same outputs beside any others, with a bias and without."""
    draw = torch.Generator().manual_seed(inputs)
    weight, bias = (torch.randn(outputs, *more, generator=draw).to(dtype) for more in ((inputs,), ()))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for added in (None, bias):
            rows = torch.randn(17, inputs, generator=draw).to(dtype)
            wanted = rows.double() @ weight.double().T + (0 if added is None else added.double())
            close = 1e-5 if dtype is torch.float32 else 3e-3

            def is_right(found: NativeProduct, rows=rows, wanted=wanted, close=close) -> bool:
                return bool((found.compute(rows).double() - wanted).norm() <= close * wanted.norm())

            right = [found for found in native_products(packed, added, inputs, outputs) if is_right(found)]
            assert len(right) == 1
            whole = right[0].compute(rows[None])
            assert whole.shape == (1, 17, outputs) and whole.dtype is dtype
            for count in (1, 2, 5, 6, 13):
                assert torch.equal(right[0].compute(rows[:count]), whole[0, :count])
    finally:
        torch.set_num_threads(before)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_products_are_the_plain_ones(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_products(dtype, *shape)
    check_products(dtype, *shape, threads=3)


@needs_library
def test_without_the_library_or_products_of_a_dtype_there_is_none() -> None:
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(64, 64), 64)
    assert list(native_products(packed, None, 64, 64))
    use_native(False)
    try:
        assert not list(native_products(packed, None, 64, 64))
    finally:
        use_native(True)
    half = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    if half:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(64, 64).half(), 64)
        assert not list(native_products(packed, None, 64, 64))
