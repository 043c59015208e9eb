"""Random steps of sequences on a pool, by one backend, beside the slow way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from quire.kernels import reference, tiles
from quire.kernels.attention import paged_attention
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVFields, PagedField
from quire.kernels.terms import AttentionTerms
from tests.kernels.paged_case import in_tree

SMALL_TILES = {"MAX_SHARED_ROWS": 8, "WINDOW_ROWS": 8}
SMALL = {"MOST_TOKENS": 128, "MOST_PAIRS": 1500, "MOST_SCORES": 4000}
"""Sizes at which a context of a hundred tokens meets every case."""
KV_HEADS, GROUP, DIM = 2, 2, 8
TOLERANCE = 1e-5


@dataclass(eq=False)
class Sequence:
    """`keys` and `values` `[tokens, kv_heads, dim]`, and the frames of its pages, 0 where they were given back."""

    row: int
    keys: Tensor
    values: Tensor
    frames: list[int] = field(default_factory=list)
    tree: list[int] = field(default_factory=list)  # parents of the new tokens, where these are drafts that branch


class Steps:
    """A pool in which all that no sequence holds is NaN, and sequences that grow, share, come and go on it."""

    def __init__(self, seed: int, backend: AttentionBackend) -> None:
        self.backend = backend
        self.random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.page_size = int(self.random.choice([1, 4, 16]))
        self.window = int(self.random.choice([0, 0, 6, 20, 48, 150]))
        self.chunked = bool(self.window and self.random.random() < 0.3)
        self.scattered = self.random.random() < 0.6
        self.pool = torch.full((2, 2400 // self.page_size, self.page_size, KV_HEADS, DIM), torch.nan)
        self.held = np.arange(self.pool.shape[1]) == 0
        self.running: list[Sequence] = []

    def run(self, steps: int) -> None:
        """That many steps. Raises AssertionError where an answer differs."""
        with self._small():
            for _ in range(steps):
                for change in (self.join, self.leave, self.reorder, self.replace, self.roll_back):
                    if self.random.random() < 0.15:
                        change()
                if not self.running:
                    self.join()
                self.step()

    @contextmanager
    def _small(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(patch.multiple(tiles, **SMALL_TILES))
            stack.enter_context(patch.multiple(reference, **SMALL))
            yield

    # What happens between steps

    def join(self) -> None:
        """A sequence of which some tokens are computed already: the first ones of another one, or any."""
        taken = {sequence.row for sequence in self.running}
        if len(taken) == 9:
            return
        row = next(row for row in self.random.permutation(12).tolist() if row not in taken)
        empty = torch.zeros(0, KV_HEADS, DIM)
        new = Sequence(row, empty, empty)
        if self.running and not self.window and self.random.random() < 0.6:
            other = self.running[self.random.integers(len(self.running))]
            pages = int(self.random.integers(0, len(other.keys) // self.page_size + 1))
            new.frames = other.frames[:pages]
            new.keys, new.values = (part[: pages * self.page_size].clone() for part in (other.keys, other.values))
        self._write(new, int(self.random.choice([0, 3, 20, 60, 100])))
        self.running.insert(int(self.random.integers(len(self.running) + 1)), new)

    def leave(self) -> None:
        """A sequence ends, and what only it held is lost."""
        if self.running:
            self.running.pop(int(self.random.integers(len(self.running))))
            self._erase()

    def reorder(self) -> None:
        """The same sequences in another order."""
        self.running = [self.running[at] for at in self.random.permutation(len(self.running)).tolist()]

    def replace(self) -> None:
        """Any page of a sequence is found elsewhere, with the same contents, and its frame is given back."""
        sequence = self.running[self.random.integers(len(self.running))] if self.running else None
        if sequence is not None and sequence.frames:
            page = int(self.random.integers(len(sequence.frames)))
            if sequence.frames[page]:
                frame = self._frame()
                self.pool[:, frame] = self.pool[:, sequence.frames[page]]
                sequence.frames[page] = frame
                self._erase()

    def roll_back(self) -> None:
        """The last tokens of a sequence are given up."""
        sequence = self.running[self.random.integers(len(self.running))] if self.running else None
        if sequence is None or self.window or len(sequence.keys) < 6:
            return
        length = len(sequence.keys) - int(self.random.integers(1, 6))
        page, offset = divmod(length, self.page_size)
        if offset:
            frame = sequence.frames[page]
            if any(frame in other.frames for other in self.running if other is not sequence):
                return
            self.pool[:, frame, offset:] = torch.nan
        sequence.frames = sequence.frames[: page + (offset > 0)]
        sequence.keys, sequence.values = sequence.keys[:length], sequence.values[:length]
        self._erase()

    # A step

    def step(self) -> None:
        """New tokens of most sequences, and the attention of their rows."""
        part = [sequence for sequence in self.running if self.random.random() < 0.97]
        usual = int(self.random.choice([1, 1, 1, 1, 4]))
        counts = []
        for sequence in part:
            odd = self.random.random() < 0.08
            counts.append(int(self.random.choice([0, 1, 2, 7, 40])) if odd or not len(sequence.keys) else usual)
            self._write(sequence, counts[-1])
            branches = counts[-1] > 1 and not self.chunked and self.random.random() < 0.4
            sequence.tree = (
                [int(self.random.integers(max(-1, row - 3), row)) for row in range(counts[-1])] if branches else []
            )
        present = [(sequence, count) for sequence, count in zip(part, counts, strict=True) if len(sequence.keys)]
        if not sum(count for _, count in present):
            return
        query = torch.randn(sum(count for _, count in present), KV_HEADS * GROUP, DIM)
        rows = query.split([count for _, count in present])
        wanted = torch.cat([self._expected(own, *one) for own, one in zip(rows, present, strict=True)])
        error = float((self._attend(query, present).double() - wanted).abs().max())
        assert error < TOLERANCE, f"{self.backend.about()} is off by {error}"
        for sequence, count in present:
            self._accept(sequence, count)
            self._forget(sequence)
        self._erase()

    def _attend(self, query: Tensor, present: list[tuple[Sequence, int]]) -> Tensor:
        size = self.page_size
        width = max(len(sequence.frames) for sequence, _ in present)
        frames = self.random.integers(0, 5, (len(present), width + 1)).astype(np.int32)  # what is behind them is stale
        slots: list[int] = []
        parents: list[int] = []
        for table, (sequence, count) in zip(frames, present, strict=True):
            table[: len(sequence.frames)] = sequence.frames
            positions = range(len(sequence.keys) - count, len(sequence.keys))
            tree = sequence.tree or range(-1, count - 1)
            parents += [parent + len(slots) if parent >= 0 else -1 for parent in tree]
            slots += [sequence.frames[at // size] * size + at % size for at in positions]
        batch = PagedBatch(
            query_starts=np.concatenate(([0], np.cumsum([count for _, count in present]))).astype(np.int32),
            context_lens=np.array([len(sequence.keys) for sequence, _ in present], dtype=np.int32),
            frames=frames,
            slots=np.array(slots, dtype=np.int32),
            page_size=size,
            backend=self.backend,
            parents=np.array(parents, dtype=np.int32) if any(sequence.tree for sequence, _ in present) else None,
        )
        fields = KVFields(*(PagedField(part) for part in self.pool))
        return paged_attention(
            query, fields, batch, AttentionTerms(scale=0.3, window=self.window, chunked=self.chunked)
        )

    def _expected(self, query: Tensor, sequence: Sequence, count: int) -> Tensor:
        """One softmax per row and head over all of the row's keys, in float64, from what was once written."""
        length = len(sequence.keys)
        keys, values = (part.double().repeat_interleave(GROUP, 1) for part in (sequence.keys, sequence.values))
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * 0.3
        positions, tokens = torch.arange(length - count, length)[:, None], torch.arange(length)[None, :]
        hidden = tokens > positions
        if sequence.tree:
            hidden, positions, tokens = in_tree(sequence.tree, length - count)
        if self.chunked:
            hidden |= tokens // self.window != positions // self.window
        elif self.window:
            hidden |= tokens <= positions - self.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)

    # Pages

    def _accept(self, sequence: Sequence, count: int) -> None:
        """Of drafts that branch, one and those it follows stay, and move to where the past ends."""
        if not sequence.tree:
            return
        past, size, path = len(sequence.keys) - count, self.page_size, [int(self.random.integers(count))]
        while sequence.tree[path[0]] >= 0:
            path.insert(0, sequence.tree[path[0]])
        stays = list(range(past)) + [past + row for row in path]
        sequence.keys, sequence.values = sequence.keys[stays], sequence.values[stays]
        for at in range(past, past + count):
            written = self.pool[:, sequence.frames[at // size], at % size]
            written[:] = torch.nan
            if at < len(stays):
                written[0], written[1] = sequence.keys[at], sequence.values[at]
        sequence.frames = sequence.frames[: -(-len(stays) // size)]
        sequence.tree = []

    def _write(self, sequence: Sequence, count: int) -> None:
        """New tokens of a sequence, with frames for them."""
        begin = len(sequence.keys)
        new = torch.randn(2, count, KV_HEADS, DIM)
        sequence.keys, sequence.values = torch.cat((sequence.keys, new[0])), torch.cat((sequence.values, new[1]))
        for at in range(count):
            page, offset = divmod(begin + at, self.page_size)
            if page == len(sequence.frames):
                sequence.frames.append(self._frame())
            self.pool[:, sequence.frames[page], offset] = new[:, at]

    def _frame(self) -> int:
        """A free frame: any, or the first one."""
        free = np.flatnonzero(~self.held)
        found = int(self.random.choice(free)) if self.scattered else int(free[0])
        self.held[found] = True
        return found

    def _forget(self, sequence: Sequence) -> None:
        """Give back the pages that no token to come can read."""
        length = len(sequence.keys)
        first = length - length % self.window if self.chunked else length - self.window + 1 if self.window else 0
        gone = max(first, 0) // self.page_size
        sequence.frames[:gone] = [0] * gone

    def _erase(self) -> None:
        """Lose what no sequence holds."""
        self.held[1:] = False
        for sequence in self.running:
            self.held[sequence.frames] = True
        self.pool[:, torch.from_numpy(~self.held)] = torch.nan


def check_steps(seed: int, backend: AttentionBackend) -> None:
    """Forty steps."""
    Steps(seed, backend).run(40)
