"""Native draws against those by torch's operators: the same tokens for any logits, filters and company."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.engine.device import sampler
from quire.engine.device.sampler import Sampler
from quire.kernels.native import draws, library
from quire.kernels.native.library import Native, build, native, sources
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.step import TERMS, Places, terms_of
from tests.changes import slow_unless_changed

needs_library = pytest.mark.skipif(native().library is None, reason=native().reason)
SIZES = (1, 2, 15, 16, 17, 63, 500, 2049, 33_000)
"""Vocabularies: less than a vector, a vector and more, and more tokens than `Filters` keeps candidates."""
LOGITS = {
    "spread": lambda draw, size: torch.randn(size, generator=draw) * 3,
    "narrow": lambda draw, size: torch.randn(size, generator=draw) * 0.01,
    "peaked": lambda draw, size: torch.randn(size, generator=draw) * 40,
    "ties": lambda draw, size: torch.randint(-4, 4, (size,), generator=draw).float(),
    "flat": lambda draw, size: torch.zeros(size),
    "equal": lambda draw, size: torch.full((size,), 12.6257),
    "close": lambda draw, size: 1000 + torch.randint(-2, 3, (size,), generator=draw) * 2.0**-13,
    "forbidden": lambda draw, size: torch.randn(size, generator=draw).where(
        torch.rand(size, generator=draw) < 0.1, torch.tensor(-torch.inf)
    ),
    "nothing": lambda draw, size: torch.full((size,), -torch.inf),
    "infinite": lambda draw, size: torch.randn(size, generator=draw).index_fill(0, torch.tensor(size // 2), torch.inf),
    "broken": lambda draw, size: torch.randn(size, generator=draw).index_fill(0, torch.tensor(size // 3), torch.nan),
}


def rows_of(seed: int, size: int) -> tuple[torch.Tensor, list[Request]]:
    """Each kind of logits, with random filters."""
    draw, random = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    rows, requests = [], []
    for number, make in enumerate(LOGITS.values()):
        rows.append(make(draw, size))
        params = SamplingParams(
            seed=seed,
            temperature=float(random.choice([0.0, 1e-5, 0.01, 0.7, 1.0, 1.9])),
            top_k=int(random.choice([0, 0, 1, 2, 50, 1500, 10**6])),
            top_p=float(random.choice([1.0, 1.0, 1e-9, 0.3, 0.951, 0.99999, 1 - 2**-53])),
            min_p=float(random.choice([0.0, 0.0, 0.07, 1.0])),
        )
        requests.append(Request(f"r{number}", np.ones(1, np.int32), params, max_tokens=9, index=number))
    return torch.stack(rows), requests


def tokens_of(rows: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """What these draw."""
    places = Places(np.array(list(map(terms_of, requests)), dtype=TERMS), np.zeros(len(requests), np.int64), requests)
    found: list[int] = Sampler([]).draw(rows.clone(), places).tokens.tolist()
    return found


def check_draws(seed: int, size: int, threads: int = 1) -> None:
    """The tokens of a step are those of the operators, and those of each row alone."""
    rows, requests = rows_of(seed, size)
    before, mine = torch.get_num_threads(), sampler.native_draws
    torch.set_num_threads(threads)
    try:
        found = tokens_of(rows, requests)
        assert found == [tokens_of(rows[i : i + 1], requests[i : i + 1])[0] for i in range(len(requests))]
        sampler.native_draws = lambda *_: None
        assert found == tokens_of(rows, requests)
    finally:
        sampler.native_draws = mine
        torch.set_num_threads(before)


@needs_library
@pytest.mark.parametrize("size", SIZES)
def test_draws_are_those_of_operators(size: int) -> None:
    """For logits of each kind, NaN and infinities among them, and filters of each kind, in one thread and in three."""
    for seed in range(4 if size > 2049 else 20):
        check_draws(seed, size, threads=1 + 2 * (seed % 2))


@needs_library
@slow_unless_changed("src/quire/kernels/native/draws.cpp", "src/quire/kernels/native/vectors.h")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize("narrower", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors_draw_the_same(narrower: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library for a CPU without the widest vectors, or without the wide ones, has the tokens of the operators."""
    texts = {name: text for name, text in sources().items() if name in ("draws.cpp", "vectors.h")}
    monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, narrower))
    path = build(texts, tmp_path)
    narrow = Native(ctypes.CDLL(str(path)), path)
    monkeypatch.setattr(draws, "native", lambda: narrow)
    for size in (15, 500):
        for seed in range(20):
            check_draws(seed, size)
