"""PageArrays: the host arrays of a step that kernels read pages by, and page tables that are on the device already."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from quire.kernels.segments import Slots, shared_runs
from quire.spec.ids import Ids

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
        """The same for some sequences of the batch."""
        return replace(self, rows=self.rows[sequences])

    def padded(self, size: int) -> StepTable:
        """The same for further sequences up to `size`, which have the last row."""
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

    def shared_runs(self, full_pages: Slots, name: Hashable) -> list[Run]:
        """`segments.shared_runs`. With a `table`, runs of the step before with this `name` stay as long as the batch
        has the same sequences and its full pages do not change, so that a decode step compares no pages."""
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
