"""PageArrays: the host arrays of a step that kernels read pages by, and page tables that are on the device already.

Also what follows from them: runs of pages that sequences share, and the trees of drafts that branch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from quire.kernels.slots import Slots
from quire.spec.ids import Bools, Ids

MIN_SHARED_TOKENS = 256
"""Reads that a shared run must save (tokens times readers beyond the first) to be read once."""

T = TypeVar("T")
Run = tuple[Slots, int, int]
"""Sequences, and the first page and the end of the pages that they share."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """The page tables of a group on the device in one step, int32 `[rows, width]`; sequence r of the batch has row
    `rows[r]`. `number` counts the steps of an engine, and `changed` are the places `row * width + page` that this step
    changed. `kept` is what kernels keep from step to step."""

    device: Tensor
    rows: Slots
    number: int
    changed: Ids
    kept: dict[Hashable, Any]

    def part(self, sequences: Slots) -> StepTable:
        """The table of some sequences of the batch."""
        return replace(self, rows=self.rows[sequences])

    def padded(self, size: int) -> StepTable:
        """The table with further sequences up to `size`, which have the last row."""
        pads = np.full(size - len(self.rows), len(self.device) - 1, dtype=np.int64)
        return replace(self, rows=np.concatenate((self.rows, pads)))

    def has_changed(self, full_pages: Slots) -> bool:
        """Whether this step changed one of the first `full_pages[r]` entries of a sequence. Pages that requests append
        come after these."""
        row, page = np.divmod(self.changed, self.device.shape[1])
        full = np.zeros(len(self.device), dtype=np.int64)
        full[self.rows] = full_pages
        return bool(np.count_nonzero(page < full[row]))


@dataclass(frozen=True, slots=True)
class _Kept:
    """Runs, and the step, rows and full pages that they were found for."""

    number: int
    rows: Slots
    full_pages: Slots
    runs: list[Run]

    def hold(self, table: StepTable, full_pages: Slots) -> bool:
        return (
            table.number - self.number <= 1
            and np.array_equal(table.rows, self.rows)
            and bool((full_pages >= self.full_pages).all())
            and not table.has_changed(full_pages)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Drafts that branch: sequences whose rows do not simply follow each other.

    `branching` `[R]` says which. `depths` int64 `[T]` is the position of a row less the tokens before the step.
    `sees` `[T, most rows + 2]`: whether a row sees the n-th row of its sequence, which is itself or one that it
    follows; n = -1 is the past. It says nothing of rows of sequences with more rows than any that branches.
    """

    branching: Bools
    depths: Slots
    sees: Bools

    @classmethod
    def of(cls, parents: Ids, starts: Slots) -> Trees | None:
        """The trees of rows that follow `parents`, as in `PagedBatch`; None if all rows are chains."""
        counts, rows = np.diff(starts), np.arange(starts[-1])
        owners = np.repeat(np.arange(len(counts)), counts)
        firsts = starts[owners]
        branches = parents != np.where(rows == firsts, -1, rows - 1)
        if not branches.any():
            return None
        assert ((parents == -1) | ((parents >= firsts) & (parents < rows))).all(), "a row follows a row before it"
        branching = np.bincount(owners[branches], minlength=len(counts)) > 0
        most = int(counts[branching].max())
        sees = np.zeros((len(rows), most + 2), dtype=np.bool_)
        sees[:, -1] = True
        row = ancestor = rows[counts[owners] <= most]
        depths = rows - firsts
        depths[row] = -1
        while len(row):
            sees[row, ancestor - firsts[row]] = True
            depths[row] += 1
            above = parents[ancestor]
            row, ancestor = row[above >= 0], above[above >= 0]
        return cls(branching, depths, sees)

    def sight(self, rows: Slots, numbers: Slots) -> Bools:
        """Whether the `rows` `[n, count]` of n sequences see the tokens `numbers` `[n, width]` of these: `[n, count,
        width]`. A token's number is that of its row; it is negative in the past."""
        columns = np.clip(numbers, -1, self.sees.shape[1] - 2)
        found: Bools = self.sees[rows[:, :, None], columns[:, None, :]]
        return found


@dataclass(frozen=True, eq=False)
class PageArrays:
    """The arrays of a `PagedBatch`, not copied. `starts` int32 `[R + 1]`: rows `starts[r]:starts[r + 1]` are those of
    sequence r, the last of its `contexts[r]` tokens. `frames` int32 `[R, max_pages]`, `parents` int32 `[T]` or None.
    `table` has the frames too, if they are on the device. `fixed`: the shapes of all that is derived follow from T
    alone, so that a CUDA graph can read it."""

    starts: Ids
    contexts: Ids
    frames: Ids
    parents: Ids | None
    page_size: int
    table: StepTable | None = None
    fixed: bool = False
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False, init=False)
    builds: dict[Hashable, Callable[[PageArrays], Any]] = field(default_factory=dict, repr=False, init=False)

    def derived(self, name: Hashable, build: Callable[[PageArrays], T]) -> T:
        """The result of `build`; built on first use, then shared by all layers of the step."""
        if name not in self._derived:
            self.builds[name] = build
            self._derived[name] = build(self)
        found: T = self._derived[name]
        return found

    @cached_property
    def trees(self) -> Trees | None:
        """The trees of the batch; None if all rows are chains."""
        return None if self.parents is None else Trees.of(self.parents, self.starts.astype(np.int64))

    def shared_runs(self, full_pages: Slots, name: Hashable) -> list[Run]:
        """The module's `shared_runs`. With a `table`, runs of the step before with this `name` stay as long as the
        batch has the same sequences and its full pages do not change, so that a decode step compares no pages."""
        table = self.table
        if table is None:
            return list(shared_runs(self.frames, full_pages, self.page_size))
        kept: _Kept | None = table.kept.get(name)
        if kept is not None and kept.hold(table, full_pages):
            runs = kept.runs
        else:
            runs = list(shared_runs(self.frames, full_pages, self.page_size))
        table.kept[name] = _Kept(table.number, table.rows, full_pages, runs)
        return runs


def shared_runs(frames: Ids, full_pages: Slots, page_size: int) -> Iterator[tuple[Slots, int, int]]:
    """(members, first, stop): sequences whose page tables agree on pages `first:stop` and on every page before.

    Only the first `full_pages[r]` pages of sequence r may be shared. A member of a run is a member of every run before
    it in the same table, so its runs are consecutive from page 0.
    """
    pending = [(np.flatnonzero(full_pages > 0), 0, 0)]  # members that agree up to `depth`, runs used up to `first`
    while pending:
        candidates, first, depth = pending.pop()
        candidates = candidates[full_pages[candidates] > depth]
        if len(candidates) < 2:
            continue
        column = frames[candidates, depth]
        order = np.argsort(column, kind="stable")
        bounds = np.concatenate(([0], np.flatnonzero(np.diff(column[order])) + 1, [len(order)]))
        for family in np.flatnonzero(np.diff(bounds) > 1).tolist():
            members = candidates[order[bounds[family] : bounds[family + 1]]]  # ascending, since the sort is stable
            limit = int(full_pages[members].min())
            table = frames[members, depth:limit]
            differs = np.flatnonzero((table != table[0]).any(axis=0))
            stop = depth + int(differs[0]) if len(differs) else limit
            worthwhile = (len(members) - 1) * (stop - first) * page_size >= MIN_SHARED_TOKENS
            if worthwhile:
                yield members, first, stop
            pending.append((members, stop if worthwhile else first, stop))
