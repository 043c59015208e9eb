"""PagedBatch: the rows of one step, and where their keys and values are. Host arrays, built once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.errors import UnsupportedModel
from quire.kernels.backend import DEFAULT, AttentionBackend
from quire.kernels.fields import SlotIndex
from quire.kernels.page_arrays import Run, StepTable, Trees, shared_runs
from quire.kernels.slots import Slots, flatten_ranges
from quire.kernels.state import StateBatch
from quire.spec.ids import Ids
from quire.upload import to_device

T = TypeVar("T")
Builds = dict[Hashable, Callable[["PagedBatch"], Any]]
"""What layers derive from a batch, by name."""


@dataclass(eq=False, kw_only=True)
class PagedBatch:
    """`R` sequences packed into one flat batch of `T` rows, for one step and one group. All layers share it.

    `query_starts` int32 `[R + 1]`: rows `query_starts[r]:query_starts[r + 1]` are the new tokens of sequence r.
    `context_lens` int32 `[R]`: tokens of sequence r after this step has written, its new tokens being the last of them.
    `frames` int32 `[R, max_pages]`: row r is the frame of each page, valid up to `ceil(context_lens[r] / page_size)`.
    `slots` int32 `[T]`: `frame * page_size + offset` to which each row's key and value are written. The arrays are not
    copied and must not change while the batch is in use.

    `parents` int32 `[T]`, of drafts that branch: the flat row that each row follows, -1 where that is its past. Such a
    row sees the past, the rows that it follows and itself; its position counts these. Without it, each row follows the
    one before it. Slots are in the order of rows all the same. `backend` computes attention. `table` has `frames` on
    the device. `fixed`: the shapes of all that is derived follow from T alone, so that a CUDA graph can read it. `ids`
    int64 `[R]` are the cache rows of sequences, which find hot buffers.
    """

    query_starts: Ids
    context_lens: Ids
    frames: Ids
    slots: Ids
    page_size: int
    ids: Slots | None = None
    parents: Ids | None = None
    backend: AttentionBackend = DEFAULT
    table: StepTable | None = None
    fixed: bool = False
    _derived: dict[object, Any] = field(default_factory=dict, repr=False, init=False)
    builds: Builds = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        assert self.page_size >= 1
        assert len(self.query_starts) == len(self.context_lens) + 1
        assert len(self.frames) == len(self.context_lens)
        assert len(self.slots) >= self.query_starts[-1]
        assert self.parents is None or len(self.parents) == self.query_starts[-1]
        if len(self.slots) != len(self.context_lens):  # else one new token each
            counts = self.query_starts[1:] - self.query_starts[:-1]
            assert not np.count_nonzero(counts > self.context_lens), "a sequence's new tokens are part of its context"

    @classmethod
    def of(cls, frames: Ids, starts: Slots, stops: Slots, page_size: int, parents: Ids | None = None) -> PagedBatch:
        """A batch that computes positions `starts[r]:stops[r]` of sequence r, whose pages are `frames[r]`."""
        counts, positions = stops - starts, flatten_ranges(starts, stops)
        page_frames = frames[np.repeat(np.arange(len(counts)), counts), positions // page_size]
        return cls(
            query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            context_lens=stops.astype(np.int32),
            frames=frames,
            slots=(page_frames * page_size + positions % page_size).astype(np.int32),
            page_size=page_size,
            parents=parents,
        )

    @property
    def num_rows(self) -> int:
        """T: rows of the flat batch that belong to a sequence."""
        return int(self.query_starts[-1])

    def spans(self) -> tuple[Slots, Slots]:
        """The positions of the rows of sequence r are `starts[r]:stops[r]`, int64."""
        stops = self.context_lens.astype(np.int64)
        return stops - np.diff(self.query_starts), stops

    def positions(self) -> Slots:
        """The position in its sequence of each of the T rows, int64."""
        if self.trees is None:
            return flatten_ranges(*self.spans())
        return np.repeat(self.spans()[0], np.diff(self.query_starts)) + self.trees.depths

    @cached_property
    def trees(self) -> Trees | None:
        """The trees of drafts that branch; None if all rows are chains."""
        return None if self.parents is None else Trees.of(self.parents, self.query_starts.astype(np.int64))

    def shared_runs(self, full_pages: Slots, name: Hashable) -> list[Run]:
        """Runs of pages that sequences share, of the first `full_pages[r]` pages of each (`shared_runs`). They are kept
        with a `table`, for attention of this `name`."""
        if self.table is None:
            return list(shared_runs(self.frames, full_pages, self.page_size))
        return self.table.shared_runs(self.frames, full_pages, self.page_size, name)

    def refuse_trees(self, what: str) -> None:
        """Raise UnsupportedModel if drafts of this batch branch, which `what` cannot compute."""
        if self.trees is not None:
            raise UnsupportedModel(
                f"drafts of one request that branch cannot be verified by {what}.",
                fix="propose one draft per position (topk 1) for this model.",
            )

    def slots_on(self, device: torch.device) -> Tensor:
        """`slots` as int64 `[T]` on `device`; copied there once per step."""
        return self.derived(("slots", device), lambda batch: to_device(batch.slots.astype(np.int64), device))

    def places_on(self, device: torch.device) -> SlotIndex:
        """`slots_on`, and what the fields of a step's layers derive from them."""
        return self.derived(("places", device), lambda batch: SlotIndex(batch.slots_on(device)))

    def part(self, sequences: Slots) -> tuple[Slots, PagedBatch]:
        """The flat rows int64 of some sequences of this batch, and a batch of these rows and sequences alone."""
        if self.fixed and len(sequences) == len(self.context_lens):
            return np.arange(self.num_rows), self  # a graph derives nothing of parts
        starts, stops = self.query_starts[sequences].astype(np.int64), self.query_starts[sequences + 1].astype(np.int64)
        rows = flatten_ranges(starts, stops)
        own_starts = np.concatenate(([0], np.cumsum(stops - starts)))
        parents = None if self.parents is None else self.parents[rows]
        if parents is not None:
            moved = np.repeat(starts - own_starts[:-1], stops - starts)
            parents = np.where(parents < 0, -1, parents - moved).astype(np.int32)
        batch = PagedBatch(
            query_starts=own_starts.astype(np.int32),
            context_lens=self.context_lens[sequences],
            frames=self.frames[sequences],
            slots=self.slots[rows],
            page_size=self.page_size,
            ids=None if self.ids is None else self.ids[sequences],
            parents=parents,
            backend=self.backend,
            table=None if self.table is None else self.table.part(sequences),
        )
        return rows, batch

    def padded(self, size: int) -> PagedBatch:
        """This batch, in which each sequence has one new token, and further such sequences up to `size`, of one token
        each, in the first slot of frame 0: for a CUDA graph of `size` rows. The last row of `table` has frame 0."""
        more = size - self.num_rows
        assert self.num_rows == len(self.context_lens) <= size and self.parents is None
        zeros = np.zeros(more, dtype=np.int32)
        return PagedBatch(
            query_starts=np.arange(size + 1, dtype=np.int32),
            context_lens=np.concatenate((self.context_lens, zeros + 1)),
            frames=np.concatenate((self.frames, np.zeros((more, self.frames.shape[1]), dtype=np.int32))),
            slots=np.concatenate((self.slots, zeros)),
            page_size=self.page_size,
            backend=self.backend,
            table=None if self.table is None else self.table.padded(size),
            fixed=True,
        )

    def derived(self, name: Hashable, build: Callable[[PagedBatch], T]) -> T:
        """The result of `build` for this batch; built on first use, then shared by all layers of the step."""
        if name not in self._derived:
            self.builds[name] = build
            self._derived[name] = build(self)
        found: T = self._derived[name]
        return found


def derive(batches: Sequence[PagedBatch | StateBatch], asked: Sequence[Builds | None], device: torch.device) -> None:
    """Derive now what layers will ask for, so that its arrays are in one copy (`Upload`). `asked` is what
    they asked of other batches; None: not known."""
    for batch, known in zip(batches, asked, strict=True):
        if isinstance(batch, StateBatch):
            batch.runs(device)
        elif known is not None:
            for name, build in known.items():
                batch.derived(name, build)
