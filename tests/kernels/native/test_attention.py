"""The native kernel on every kind of step, on several threads, and compiled for CPUs with narrower vectors."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from quire.kernels import backend
from quire.kernels.native import library
from quire.kernels.native.library import Native, build, native, sources
from tests.changes import slow_unless_changed
from tests.covering import each_of
from tests.kernels.native.emulated_pairs import with_pairs
from tests.kernels.native.emulated_tiles import with_tiles
from tests.kernels.native.native_case import check_narrow, check_native
from tests.kernels.paged_case import PagedCase, Shape

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)


@each_of("threads", [1, 3])
@each_of("seed", range(24))
def test_every_kind_of_step_equals_the_reference(seed, threads):
    check_native(seed, threads)


@each_of("threads", [1, 3])
@each_of("seed", range(15))
def test_steps_in_bfloat16_are_as_close_as_their_numbers(seed, threads):
    check_narrow(seed, threads)


@slow_unless_changed("src/quire/kernels/native/", "tests/kernels/native/")
@pytest.mark.skipif("-march=native" not in library._FLAGS, reason="another architecture")
@pytest.mark.parametrize(
    "march",
    [
        "-march=haswell",
        *(pytest.param(f"-march={name}", marks=pytest.mark.slow) for name in ("skylake-avx512", "x86-64")),
    ],
)
def test_narrower_vectors_give_the_same(march, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_FLAGS", tuple(flag.replace("-march=native", march) for flag in library._FLAGS))
    path = build(sources(), tmp_path)
    monkeypatch.setattr(backend, "native", lambda: Native(ctypes.CDLL(str(path)), path))
    for seed in range(8):
        check_native(seed)
        check_narrow(seed)


@slow_unless_changed("src/quire/kernels/native/", "tests/kernels/native/")
def test_pairs_of_bfloat16_give_the_same(monkeypatch, tmp_path):
    """On a CPU without AVX512-BF16 its instructions are emulated."""
    path = build(with_pairs(sources()), tmp_path)
    monkeypatch.setattr(backend, "native", lambda: Native(ctypes.CDLL(str(path)), path))
    for seed in range(12):
        check_narrow(seed)


@slow_unless_changed("src/quire/kernels/native/", "tests/kernels/native/")
def test_tiles_of_bfloat16_give_the_same(monkeypatch, tmp_path):
    """On a CPU without AMX its instructions are emulated."""
    path = build(with_tiles(with_pairs(sources())), tmp_path)
    monkeypatch.setattr(backend, "native", lambda: Native(ctypes.CDLL(str(path)), path))
    for seed in range(12):
        check_narrow(seed)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_sizes_of_heads(dim, dtype):
    case = PagedCase([(70, 1), (50, 20)], page_size=16, shape=Shape(key_dim=dim, value_dim=dim, dtype=dtype))
    case.batch.backend = backend.AttentionBackend("native")
    assert case.error(scale=dim**-0.5) < {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_turn_scores_around(scale: float, dtype: torch.dtype) -> None:
    case = PagedCase([(70, 1), (150, 100)], page_size=16, shape=Shape(key_dim=64, value_dim=64, dtype=dtype))
    case.batch.backend = backend.AttentionBackend("native")
    assert case.error(scale=scale) < {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert case.error(scale=scale, softcap=2.0) < {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize(("window", "chunked"), [(0, False), (130, False), (300, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_has_more_queries_than_a_task(dtype: torch.dtype, window: int, chunked: bool) -> None:
    """A task has 1,024 of a head. Some of those see all of a block of tokens, some a part of it, and some nothing."""
    shape = Shape(key_dim=64, value_dim=64, dtype=dtype)
    case = PagedCase([(1500, 1200), (70, 64)], page_size=16, shape=shape)
    case.batch.backend = backend.AttentionBackend("native")
    error = case.error(scale=0.125, window=window, chunked=chunked)
    assert error < {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]


def test_a_shared_run_needs_no_plan():
    case = PagedCase([(2112, 1)] * 16, page_size=16, shared=2048)
    case.batch.backend = backend.AttentionBackend("native")
    assert case.error(scale=0.3) < 1e-5


@pytest.mark.parametrize("threads", [1, 3])
def test_a_piece_of_a_context_that_was_never_written_shows(threads):
    """All scores of a piece are NaN then, and it has no largest one, like a piece of which a row sees nothing."""
    case = PagedCase([(2000, 1)], page_size=16)
    case.batch.backend = backend.AttentionBackend("native")
    case.keys[np.divmod(case.slots[0][:1024], case.keys.shape[1])] = torch.nan
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert case.attend(scale=0.3).isnan().all()
    finally:
        torch.set_num_threads(before)
