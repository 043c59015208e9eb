"""What kernels that read pages take of a step: page tables that are on the device already, runs of pages that sequences
share, and the trees of drafts that branch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from quire.kernels.slots import Slots
from quire.spec.ids import Bools, Ids

MIN_SHARED_TOKENS = 256
"""Reads that a shared run must save (tokens times readers beyond the first) to be read once."""

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

    def shared_runs(self, frames: Ids, full_pages: Slots, page_size: int, name: Hashable) -> list[Run]:
        """The module's `shared_runs`. Runs of the step before with this `name` stay as long as the batch has the same
        sequences and its full pages do not change, so that a decode step compares no pages."""
        kept: _Kept | None = self.kept.get(name)
        if kept is not None and kept.hold(self, full_pages):
            runs = kept.runs
        else:
            runs = list(shared_runs(frames, full_pages, page_size))
        self.kept[name] = _Kept(self.number, self.rows, full_pages, runs)
        return runs

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
