"""A step of paged sequences with random contents, and what attention gives on it, computed the slow way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.attention import paged_attention
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVFields, PagedField
from quire.kernels.native.library import native
from quire.kernels.terms import AttentionTerms

BACKEND = AttentionBackend()
"""Of all cases; `both_backends` sets it."""


@pytest.fixture(autouse=True, scope="module", params=["torch", "native"])
def both_backends(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """In a module that imports it, every test runs on torch's operators and on the native kernel, which computes every
    call that it is given."""
    if request.param == "native" and native().library is None:
        pytest.skip(native().reason)
    with pytest.MonkeyPatch.context() as patch:
        backend = AttentionBackend(request.param)
        patch.setattr("tests.kernels.paged_case.BACKEND", backend)
        yield backend
    assert not backend.fallbacks and set(backend.calls) == {request.param}


@dataclass(frozen=True)
class Shape:
    """Heads and dims of a case."""

    kv_heads: int = 2
    group: int = 2
    key_dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float32


def in_tree(parents: Sequence[int], past: int) -> tuple[Tensor, Tensor, Tensor]:
    """What rows of a tree do not see, `[rows, past + rows]`, and the positions of rows and of all tokens."""
    hidden, depths = torch.ones(len(parents), len(parents), dtype=torch.bool), []
    for row, parent in enumerate(parents):
        if parent >= 0:
            hidden[row] = hidden[parent]
        hidden[row, row] = False
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    positions = past + torch.tensor(depths)
    tokens = torch.cat((torch.arange(past), positions))[None, :]
    return torch.cat((torch.zeros(len(parents), past, dtype=torch.bool), hidden), dim=1), positions[:, None], tokens


def apart(frames: Tensor, gap: int) -> Tensor:
    """The same frames with NaN before, between and behind them, as other fields of a pool are."""
    records = torch.full((len(frames), frames[0].numel() + gap), torch.nan, dtype=frames.dtype)
    found = records[:, 1 : 1 - gap].view(frames.shape)
    return found.copy_(frames)


class PagedCase:
    """Sequences `(context, new tokens)`, the first `shared` tokens of all of them being the same pages.

    `trees` are the parents of each sequence's new rows, from 0 for its first one; by default rows are chains. With
    `records`, frames are in host memory. The distance of frames is a number of entries, or with an odd seed another.

    Whatever no sequence has written is NaN, frame 0 included, so a stray read shows.
    """

    def __init__(
        self,
        sequences: Sequence[tuple[int, int]],
        *,
        page_size: int,
        shared: int = 0,
        scattered: bool = True,
        shape: Shape = Shape(),
        seed: int = 0,
        trees: Sequence[Sequence[int]] | None = None,
        records: bool = False,
    ) -> None:
        self.trees = trees
        self.records = records
        self.sequences = list(sequences)
        self.shape = shape
        generator = np.random.default_rng(seed)
        torch.manual_seed(seed)
        frames = self._frames(page_size, shared // page_size, scattered, generator)
        num_frames = int(frames.max()) + 2
        self.keys = torch.full((num_frames, page_size, shape.kv_heads, shape.key_dim), torch.nan, dtype=shape.dtype)
        self.values = torch.full((num_frames, page_size, shape.kv_heads, shape.value_dim), torch.nan, dtype=shape.dtype)
        self.slots = [self._slots(frames[r], context, page_size) for r, (context, _) in enumerate(sequences)]
        written = torch.from_numpy(np.unique(np.concatenate(self.slots)))
        for pool in (self.keys, self.values):
            flat = pool.flatten(0, 1)
            flat[written] = torch.randn(len(written), *flat.shape[1:], dtype=torch.float32).to(shape.dtype)
        self.keys, self.values = (
            apart(pool, 5 if seed % 2 else gap * pool[0, 0].numel()) for pool, gap in ((self.keys, 3), (self.values, 2))
        )
        counts = [new for _, new in sequences]
        parents = None
        if trees is not None:
            firsts = np.cumsum(counts) - counts
            found = [
                np.asarray(tree) + first * (np.asarray(tree) >= 0) for tree, first in zip(trees, firsts, strict=True)
            ]
            parents = np.concatenate(found).astype(np.int32)
        new_slots = np.concatenate([s[len(s) - new :] for s, new in zip(self.slots, counts, strict=True)])
        self.batch = PagedBatch(
            query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            context_lens=np.array([context for context, _ in sequences], dtype=np.int32),
            frames=frames,
            slots=new_slots.astype(np.int32),
            page_size=page_size,
            parents=parents,
            backend=BACKEND,
        )
        heads = shape.kv_heads * shape.group
        self.query = torch.randn(heads, len(new_slots), shape.key_dim).to(shape.dtype).transpose(0, 1)
        self.new = torch.from_numpy(new_slots)

    def _frames(self, page_size: int, shared_pages: int, scattered: bool, generator: np.random.Generator) -> np.ndarray:
        pages = [-(-context // page_size) for context, _ in self.sequences]
        ids = np.arange(1, sum(pages) + 1)
        order = iter((generator.permutation(ids) if scattered else ids).tolist())
        frames = np.full((len(pages), max(pages)), -1, dtype=np.int32)
        for r, count in enumerate(pages):
            frames[r, :count] = [next(order) for _ in range(count)]
            frames[r, : min(shared_pages, count)] = frames[0, : min(shared_pages, count)]
        return frames

    @staticmethod
    def _slots(table: np.ndarray, context: int, page_size: int) -> np.ndarray:
        return np.array([int(table[t // page_size]) * page_size + t % page_size for t in range(context)])

    def attend(self, window: int | None = 0, *, chunked: bool = False, **options: Any) -> Tensor:
        """The kernel's answer."""
        pools = (self.keys, self.values)
        reader = self.keys.device if self.records else None
        fields = KVFields(*(PagedField(pool, reader=reader) for pool in pools))
        terms = AttentionTerms(window=window or 0, chunked=chunked and bool(window), **options)
        return paged_attention(self.query, fields, self.batch, terms)

    def expected(
        self,
        *,
        scale: float,
        window: int | None = 0,
        chunked: bool = False,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One softmax per row and head over all of the row's keys, in float64."""
        outs = []
        for r, (context, new) in enumerate(self.sequences):
            rows = self.query[self.batch.query_starts[r] : self.batch.query_starts[r + 1]].double()
            key, value = (
                pool.flatten(0, 1)[torch.from_numpy(self.slots[r])].double().repeat_interleave(self.shape.group, 1)
                for pool in (self.keys, self.values)
            )
            scores = torch.einsum("qhd,khd->hqk", rows, key) * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            positions, tokens = torch.arange(context - new, context)[:, None], torch.arange(context)[None, :]
            hidden = tokens > positions
            if self.trees is not None:
                hidden, positions, tokens = in_tree(self.trees[r], context - new)
            if window and chunked:
                hidden |= tokens // window != positions // window
            elif window:
                hidden |= tokens <= positions - window
            scores[:, hidden] = -torch.inf
            weights = scores.exp()
            total = weights.sum(-1)
            if sinks is not None:
                total = total + sinks.double().exp()[:, None]
            outs.append(torch.einsum("hqk,khd->qhd", weights / total[..., None], value))
        return torch.cat(outs)

    def error(self, **options: object) -> float:
        """Largest difference between the two; NaN if the kernel read what was never written."""
        return float((self.attend(**options).double() - self.expected(**options)).abs().max())
