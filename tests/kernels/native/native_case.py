"""Random steps of every kind on the native kernel, against the slow answer. What was never written is NaN."""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.backend import AttentionBackend
from tests.kernels import paged_case
from tests.kernels.paged_case import PagedCase, Shape

TREE = [-1, 0, 0, 1, 1, 2]
SHAPES = (
    Shape(key_dim=32, value_dim=32),
    Shape(kv_heads=1, group=3, key_dim=64, value_dim=16),
    Shape(kv_heads=3, group=1, key_dim=20, value_dim=12),
    Shape(kv_heads=2, group=4, key_dim=128, value_dim=128),
)
NARROW = tuple(
    Shape(kv_heads=heads, group=group, key_dim=key_dim, value_dim=value_dim, dtype=torch.bfloat16)
    for heads, group, key_dim, value_dim in (
        (2, 1, 32, 32),
        (1, 3, 64, 96),
        (3, 2, 48, 64),
        (2, 4, 64, 48),
        (1, 8, 128, 128),
        (2, 2, 40, 24),
    )
)


def check_native(seed: int, threads: int = 3) -> None:
    """One step, with a shared prefix or with trees, and each option; of half of the seeds, in records of host memory.
    `threads` cut its tasks into pieces."""
    rng = np.random.default_rng(seed)
    shape, size = SHAPES[seed % len(SHAPES)], int(rng.choice([1, 5, 16]))
    shared = int(rng.choice([0, 320]))
    counts = [1, int(rng.integers(1, 7)), int(rng.integers(1, 200)), 1]
    trees, mix = None, [(shared + count + int(rng.integers(0, 700)), count) for count in counts]
    if seed % 3 == 0:
        trees = [TREE, [-1, 0, 1, 2], TREE, [-1]]
        mix = [(shared + len(tree) + int(rng.integers(0, 90)), len(tree)) for tree in trees]
    before, threads_before = paged_case.BACKEND, torch.get_num_threads()
    paged_case.BACKEND = AttentionBackend("native")
    torch.set_num_threads(threads)
    try:
        records = seed % 8 > 3
        case = PagedCase(mix, page_size=size, shared=shared, shape=shape, seed=seed, trees=trees, records=records)
        assert case.error(scale=0.3) < 1e-4
        assert case.error(scale=0.3, window=int(rng.integers(2, 70))) < 1e-4
        if trees is None:
            assert case.error(scale=0.3, window=int(rng.integers(2, 70)), chunked=True) < 1e-4
        assert case.error(scale=0.3, softcap=4.0) < 1e-4
        assert case.error(scale=0.3, sinks=torch.linspace(-2, 3, shape.kv_heads * shape.group)) < 1e-4
    finally:
        paged_case.BACKEND = before
        torch.set_num_threads(threads_before)


def check_narrow(seed: int, threads: int = 1) -> None:
    """A step of decodes and of chunks in bfloat16, with odd numbers of tokens, and some options. Where the CPU
    multiplies bfloat16, queries and weights are bfloat16 too."""
    rng = np.random.default_rng(seed)
    shape = NARROW[seed % len(NARROW)]
    mix = [(count + int(rng.integers(2, 300)), count) for count in (1, 1, 2, 3, int(rng.integers(9, 150)))]
    before, threads_before = paged_case.BACKEND, torch.get_num_threads()
    paged_case.BACKEND = AttentionBackend("native")
    torch.set_num_threads(threads)
    try:
        case = PagedCase(mix, page_size=int(rng.choice([1, 5, 16])), shape=shape, seed=seed, records=seed % 2 > 0)
        scale = shape.key_dim**-0.5
        assert case.error(scale=scale) < 2e-2
        assert case.error(scale=scale, window=int(rng.integers(2, 70))) < 2e-2
        assert case.error(scale=scale, softcap=4.0, sinks=torch.linspace(-2, 3, shape.kv_heads * shape.group)) < 2e-2
    finally:
        paged_case.BACKEND = before
        torch.set_num_threads(threads_before)
