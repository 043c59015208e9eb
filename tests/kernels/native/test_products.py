"""Native products of a few rows with weights that oneDNN packs, against plain ones."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from quire.kernels.native import library, products
from quire.kernels.native.library import Native, build, native, sources, use_native
from quire.kernels.native.products import NativeProduct, Panels, native_products
from tests.changes import slow_unless_changed
from tests.kernels.native.emulated_pairs import with_pairs
from tests.kernels.native.emulated_tiles import HAS_TILES, with_tiles

COUNTS = (0, 1, 2, 5, 6, 7, 12, 13, 16, 18, 19, 31, 33, 47, 64, 240, 241, 487)
MOST = 500
PAIRS = ((64, 192, 32), (256, 80, 64), (96, 16, 64), (62, 100, 32), (64, 40, 16))
"""Inputs and outputs of products of pairs of bfloat16, and widths of panels; the last two are not those of tiles."""
SHAPES = ((256, 512), (70, 100), (704, 256), (512, 2048), (96, 80), (32, 16))
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
            rows = torch.randn(MOST, inputs, generator=draw).to(dtype)
            wanted = rows.double() @ weight.double().T + (0 if added is None else added.double())
            close = 1e-5 if dtype is torch.float32 else 3e-3

            def is_right(found: NativeProduct, rows=rows, wanted=wanted, close=close) -> bool:
                return bool((found.compute(rows).double() - wanted).norm() <= close * wanted.norm())

            right = [found for found in native_products(packed, added, inputs, outputs) if is_right(found)]
            assert len(right) == 1
            whole = right[0].compute(rows[None])
            assert whole.shape == (1, MOST, outputs) and whole.dtype is dtype
            for count in COUNTS:
                assert torch.equal(right[0].compute(rows[:count]), whole[0, :count])
    finally:
        torch.set_num_threads(before)


def check_pairs(threads: int = 2) -> None:
    """Products of bfloat16 with panels that lie as oneDNN's, which not every CPU has: right, and a row has the same
    outputs beside any others."""
    kernels, before = products.native().library, torch.get_num_threads()
    assert kernels is not None
    torch.set_num_threads(threads)
    try:
        for inputs, outputs, width in PAIRS:
            draw = torch.Generator().manual_seed(inputs)
            weight, bias, rows = (
                torch.randn(*size, generator=draw).bfloat16()
                for size in ((outputs, inputs), (outputs,), (MOST, inputs))
            )
            depth = -(-inputs // 32) * 32
            whole = torch.nn.functional.pad(weight, (0, depth - inputs, 0, -outputs % width))
            packed = whole.view(-1, width, depth // 2, 2).transpose(1, 2).contiguous()
            places = {"weights": packed.data_ptr(), "bias": bias.data_ptr(), "format": 1, "rows_format": 1}
            panels = Panels(**places, inputs=inputs, outputs=outputs, depth=depth, width=width)
            assert kernels.quire_can_multiply(ctypes.byref(panels))
            product = NativeProduct(kernels, panels)
            wanted, found = rows.double() @ weight.double().T + bias.double(), product.compute(rows)
            assert (found.double() - wanted).norm() <= 3e-3 * wanted.norm()
            for count in COUNTS:
                assert torch.equal(product.compute(rows[:count]), found[:count])
    finally:
        torch.set_num_threads(before)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_products_are_the_plain_ones(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_products(dtype, *shape)
    check_products(dtype, *shape, threads=3)


@needs_library
@slow_unless_changed("src/quire/kernels/native/", "tests/kernels/native/")
@pytest.mark.parametrize("tiles", [True, False])
def test_products_with_and_without_tiles(tiles: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU without AMX its instructions are emulated, and on one with AMX the other products are computed too."""
    texts = with_pairs(sources())
    if tiles:
        texts = with_tiles(texts)
    elif HAS_TILES:
        monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, "-mno-amx-bf16"))
    path = build(texts, tmp_path)
    monkeypatch.setattr(products, "native", lambda: Native(ctypes.CDLL(str(path)), path))
    check_pairs()
    kernels, found = ctypes.CDLL(str(path)), []
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        found += [
            NativeProduct(
                kernels, Panels(inputs=inputs, outputs=64, depth=64, width=width, format=dtype, rows_format=dtype)
            ).most_rows
            for inputs, dtype, width in ((64, 1, 32), (62, 1, 32), (62, 0, 32), (62, 0, 64))
        ]
    many = sys.maxsize if torch.backends.cpu.get_cpu_capability() == "AVX512" else 64  # a panel is one of its tiles
    of_tiles = 1024 if tiles else 4  # oneDNN is faster where it has tiles and the library has none
    assert found == [of_tiles, 4, 64, many, 1024 if tiles else 64, 64, 64, many]


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
