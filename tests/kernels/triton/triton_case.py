"""Steps on the Triton kernels, run by the interpreter, against the slow answer and torch's operators. What was never
written is NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.attention import paged_attention, paged_attention_lse
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVFields, LatentFields, PagedField
from quire.kernels.terms import AttentionTerms
from quire.models.forward import paged_field
from tests.kernels.paged_case import PagedCase, Shape
from tests.kernels.stored_case import pool_of

TREE = [-1, 0, 0, 1, 1, 2]
SHAPES = (Shape(), Shape(kv_heads=1, group=3, key_dim=24, value_dim=16), Shape(kv_heads=2, group=20, value_dim=4))
CLOSE = 1e-6
"""Of float32, to either, relative to the largest number above 1."""

OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 21},
    "chunked": {"window": 40, "chunked": True},
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": True},
}


def triton_backend(programs: int = 1) -> AttentionBackend:
    """The kernels by the interpreter, with tasks cut as for a device that `programs` keep busy."""
    pytest.importorskip("triton")
    from quire.kernels.triton.attention import TritonAttention

    backend = AttentionBackend("triton")
    backend.check()
    backend.__dict__["_kernel"] = TritonAttention(torch.device("cpu"), programs)
    return backend


def check_case(case: PagedCase, programs: int = 1, close: float = CLOSE, **options: Any) -> None:
    """One call, against both."""
    if options.pop("sinks", None):
        options["sinks"] = torch.linspace(-2, 3, case.shape.kv_heads * case.shape.group)
    options = {"scale": 0.3, **options}
    backend = case.batch.backend = triton_backend(programs)
    with np.errstate(all="ignore"):  # the interpreter computes lanes that are not stored
        found = case.attend(**options)
    assert backend.calls == {"triton": 1}
    assert not backend.fallbacks
    expected = case.expected(**options)
    close *= max(1.0, float(expected.abs().max()))  # numbers above 1 are rounded to fewer places
    assert (found.double() - expected).abs().max() < close
    case.batch.backend = AttentionBackend("torch")
    assert (found - case.attend(**options)).abs().max() < 2 * close


def check_step(seed: int) -> None:
    """A mixed step of a random shape with every option, shared prefixes or trees, and tasks cut or whole."""
    rng = np.random.default_rng(seed)
    shape, page = SHAPES[seed % 2], int(rng.choice([1, 5, 16]))
    programs = int(rng.choice([1, 50]))
    shared, trees = int(rng.choice([0, 320])), None
    counts = [1, int(rng.integers(2, 7)), int(rng.integers(20, 40)), 1]
    mix = [(shared + count + int(rng.integers(0, 60)), count) for count in counts]
    if seed % 3 == 0:
        trees = [TREE, [-1, 0, 1, 2], TREE, [-1]]
        mix = [(shared + len(tree) + int(rng.integers(0, 60)), len(tree)) for tree in trees]
    case = PagedCase(mix, page_size=page, shared=shared, shape=shape, seed=seed, trees=trees)
    for name, options in OPTIONS.items():
        if trees is None or name != "chunked":
            check_case(case, programs, **options)


def latent_case(rank: int = 24, rope: int = 8, heads: int = 5) -> tuple[LatentFields, PagedBatch, Tensor]:
    """Latents of three sequences: their fields, batch and query."""
    generator = torch.Generator().manual_seed(3)
    case = PagedCase([(330, 1), (40, 12), (9, 9)], page_size=4)
    slots = torch.from_numpy(np.unique(np.concatenate(case.slots)))
    pools = [torch.full((len(case.keys), 4, width), torch.nan) for width in (rank, rope)]
    for pool in pools:
        pool.flatten(0, 1)[slots] = torch.randn(len(slots), pool.shape[-1], generator=generator)
    fields = LatentFields(*(PagedField(pool) for pool in pools))
    query = torch.randn(case.batch.num_rows, heads, rank + rope, generator=generator)
    return fields, case.batch, query


def check_latents(programs: int, window: int = 0) -> None:
    """Output and log-sum-exp over latents, against torch's operators."""
    fields, batch, query = latent_case()
    found, terms = [], AttentionTerms(scale=0.2, window=window)
    for backend in (triton_backend(programs), AttentionBackend("torch")):
        batch.backend = backend
        out = paged_attention(query, fields, batch, terms)
        found.append((out, *paged_attention_lse(query, fields, batch, terms)))
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() < 2 * CLOSE


def mend_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as bits. It multiplies these in products, and cuts numbers off: as devices do,
    products are of numbers, which are rounded to nearest, ties to even."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    from triton.runtime.interpreter import tl as language

    real_dot, real_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != language.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return real_dot(builder, wide(a), wide(b), *others)

    def cast(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != language.float32 or target.scalar != language.bfloat16:
            return real_cast(builder, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy().reshape(source.data.shape), language.bfloat16)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)
    for name in ("cast_impl", "create_fp_trunc"):
        patch.setattr(InterpreterBuilder, name, cast)


def stored_pair(kv_format: Any, width: int, num_frames: int, page: int) -> KVFields:
    """Keys and values of two heads in a format; every slot is written."""
    pool = pool_of(kv_format, frames=num_frames, page=page)
    fields = KVFields(*(paged_field(pool, name, 0) for name in "kv"))
    slots = torch.arange((num_frames + 1) * page)
    generator = torch.Generator().manual_seed(5)
    fields.write(slots, *(torch.randn(len(slots), 2, width, generator=generator) * 3 for _ in range(2)))
    return fields
