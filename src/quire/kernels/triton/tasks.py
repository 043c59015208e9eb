"""TaskPlan: the tasks of one step for the kernels of `attend`, computed by arrays from those of the batch.

    sequence   |<-- run shared with others -->|<------- own keys, to the last row -------->|
    tasks       all rows of all of them        blocks of its rows, each with what these see

A task is some rows against a run of keys. Tasks of many keys are cut until the device is busy. A row in several tasks
has a part for each, at places that follow each other.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire import upload
from quire.kernels.batch import PagedBatch
from quire.kernels.slots import Slots, flatten_ranges

MIN_PIECE = 256
"""Keys from which a task is cut."""
KEYS = 64
"""Keys of which the length of a piece is a multiple."""
PARTS_BYTES = 256 << 20
"""Parts of a step may take so much memory. Beyond it, runs that sequences share are read by each of them."""

_Int32 = npt.NDArray[np.int32]
_ALIGNED = 16 // 4
_NAMES = ("tasks", "task_rows", "places", "lows", "highs", "branches", "pasts", "sees", "merges")


@dataclass(frozen=True, eq=False)
class TaskPlan:
    """Tasks on the device. Of `tasks` int32 `[n, 5]` (first of `task_rows`, their number, first key, end of keys, row
    of the page table) the first `num_small` have few rows. `task_rows` and `places` int32 are the rows of tasks, and
    where their parts are stored: -1 if a row has no other. `lows`, `highs` `[T]` are the first and last position that a
    row sees. Rows of trees have a bit of `sees` from word `branches[row]` on for each row of their sequence, which
    begins after `pasts[row]` tokens; others have -1 there. `merges` int32 `[m, 3]`: row, first place, number of
    parts."""

    arrays: dict[str, Tensor]
    num_small: int
    num_tasks: int
    num_parts: int
    num_merges: int
    num_rows: int
    trees: bool
    _scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, init=False)

    @cached_property
    def of_rows(self) -> tuple[Tensor, ...]:
        """The arrays from `task_rows` to `sees`, in the order of a kernel's arguments."""
        return tuple(self.arrays[name] for name in _NAMES[1:8])

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all arrays begin at 16 bytes."""
        return all(array.data_ptr() % 16 == 0 for array in self.arrays.values())

    def scratch(self, heads: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`new_parts` of this plan. Layers that follow each other on one stream have the same memory."""
        found = self._scratch.get((heads, width))
        if found is None:
            found = self._scratch[heads, width] = new_parts(self.num_parts, heads, width, device)
        return found


def new_parts(num_parts: int, heads: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory of parts, float32 `[num_parts, heads, width]`, and of their log-sum-exp `[num_parts, heads]`; of one part
    if there is none."""
    count = max(num_parts, 1)
    return (
        torch.empty(count, heads, width, dtype=torch.float32, device=device),
        torch.empty(count, heads, dtype=torch.float32, device=device),
    )


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows in a task: `small` for sequences of so few, `large` for others. A task is `programs` programs, and the
    device is busy with `wanted` of them. Shared runs are read once if there are `most_parts` parts then, at most."""

    small: int
    large: int
    programs: int
    wanted: int
    most_parts: int = 2**31


def plan_tasks(batch: PagedBatch, window: int, blocks: Blocks, device: torch.device, *, chunked: bool) -> TaskPlan:
    """The plan for attention with `window` (0: everything), in one copy to `device`.

    If the batch is `fixed`, each of R sequences has one row, and all sizes follow from R and `blocks`: tasks without
    rows fill the space, every row has a part, and shared runs that find no space are read by each sequence.
    """
    starts, contexts = batch.query_starts.astype(np.int64), batch.context_lens.astype(np.int64)
    sees = _Sight.of(batch, starts, contexts, window, chunked=chunked)
    tasks = _tasks(batch, starts, contexts, sees, blocks, (window, chunked)).cut(blocks)
    space = _Space.of(len(contexts), blocks) if batch.fixed else None
    if space is not None and not space.holds(tasks):
        tasks = _tasks(batch, starts, contexts, sees, blocks, None).cut(blocks)
    places, merges, num_parts = tasks.places(len(sees.lows), whole=space is None)
    if space is None and num_parts > blocks.most_parts:
        tasks = _tasks(batch, starts, contexts, sees, blocks, None).cut(blocks)
        places, merges, num_parts = tasks.places(len(sees.lows))
    tables = tasks.sequences if batch.table is None else batch.table.rows[tasks.sequences]
    table = np.stack((tasks.at, tasks.counts, tasks.firsts, tasks.stops, tables), axis=1)
    num_small, rows = int(np.count_nonzero(~tasks.large)), tasks.rows
    if space is not None:
        table = np.concatenate((_filled(table[:num_small], space.small), _filled(table[num_small:], space.large)))
        rows, places = _filled(rows, space.rows), _filled(places, space.rows)
        num_small, num_parts = space.small, space.rows
    parts = (table, rows, places, sees.lows, sees.highs, sees.branches, sees.pasts, sees.words, merges)
    return TaskPlan(
        arrays=dict(zip(_NAMES, to_device(parts, device), strict=True)),
        num_small=num_small,
        num_tasks=len(table),
        num_parts=num_parts,
        num_merges=len(merges),
        num_rows=len(sees.lows),
        trees=bool(len(sees.words)),
    )


def to_device(parts: tuple[npt.NDArray[np.integer], ...], device: torch.device) -> list[Tensor]:
    """Arrays as int32 tensors in one copy (`upload.to_device`); each begins at 16 bytes."""
    sizes = [-(-part.size // _ALIGNED) * _ALIGNED for part in parts]
    ends = np.cumsum(sizes)
    packed: _Int32 = np.zeros(max(int(ends[-1]), 1), dtype=np.int32)
    for part, end, size in zip(parts, ends.tolist(), sizes, strict=True):
        packed[end - size : end - size + part.size] = part.reshape(-1)
    sent = upload.to_device(packed, device)
    return [
        sent[end - size : end - size + part.size] for part, end, size in zip(parts, ends.tolist(), sizes, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Space:
    """Tasks of few rows, tasks of many, and rows of all tasks together, that a plan of fixed sizes has space for."""

    small: int
    large: int
    rows: int

    @classmethod
    def of(cls, num_rows: int, blocks: Blocks) -> _Space:
        """For so many sequences of one row. Without shared runs, cutting makes at most `pieces` more of them; some
        shared runs have space too."""
        pieces = _ceil(blocks.wanted, blocks.programs)
        small = num_rows + num_rows // 2 + pieces
        large = num_rows // blocks.small + pieces if num_rows > blocks.small else 0
        return cls(small, large, small * blocks.small + large * blocks.large)

    def holds(self, tasks: _Tasks) -> bool:
        num_large = int(np.count_nonzero(tasks.large))
        return len(tasks.large) - num_large <= self.small and num_large <= self.large


def _filled(array: Slots, length: int) -> Slots:
    """`array` and zeros up to a length: tasks without rows and keys."""
    found = np.zeros((length, *array.shape[1:]), dtype=np.int64)
    found[: len(array)] = array
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Sight:
    """What each row sees; see `TaskPlan`."""

    lows: Slots
    highs: Slots
    branches: Slots
    pasts: Slots
    words: _Int32

    @classmethod
    def of(cls, batch: PagedBatch, starts: Slots, contexts: Slots, window: int, *, chunked: bool) -> _Sight:
        counts = np.diff(starts)
        owners = np.repeat(np.arange(len(counts)), counts)
        pasts = (contexts - counts)[owners]
        highs = pasts + np.arange(starts[-1]) - starts[owners]
        trees = batch.trees
        positions = highs if trees is None else pasts + trees.depths
        if not window:
            lows = np.zeros_like(positions)
        elif chunked:
            lows = positions // window * window
        else:
            lows = np.maximum(positions - window + 1, 0)
        branches, words = np.full(len(owners), -1, dtype=np.int64), np.zeros(0, dtype=np.int32)
        if trees is not None:
            own = np.flatnonzero(trees.branching[owners])
            most = int(counts[trees.branching].max())
            rows = np.minimum(starts[owners[own], None] + np.arange(most), len(owners) - 1)
            near = positions[rows] >= lows[own, None]
            bits = np.packbits(trees.sees[own, :most] & near, axis=1, bitorder="little")
            width = -(-bits.shape[1] // 4)
            words = np.zeros((len(own), width), dtype=np.int32)
            words.view(np.uint8)[:, : bits.shape[1]] = bits
            branches[own] = np.arange(len(own)) * width
            highs = np.where(branches >= 0, contexts[owners] - 1, highs)
            words = words.reshape(-1)
        return cls(lows, highs, branches, pasts, words)


@dataclass(frozen=True, slots=True, eq=False)
class _Tasks:
    """Tasks as arrays. Task i has `rows[at[i]:at[i] + counts[i]]`, and is one of `pieces[i]`, number `numbers[i]`."""

    at: Slots
    counts: Slots
    firsts: Slots
    stops: Slots
    sequences: Slots
    large: npt.NDArray[np.bool_]
    rows: Slots
    entries: Slots  # for each of `rows`, its row before tasks were cut
    pieces: Slots
    numbers: Slots

    def cut(self, blocks: Blocks) -> _Tasks:
        """Cut tasks of many keys, small tasks first and long ones first."""
        lengths = self.stops - self.firsts
        limit = max(MIN_PIECE, _ceil(int(lengths.sum()) * blocks.programs, max(blocks.wanted, 1)))
        sizes = _ceil(_ceil(lengths, _ceil(lengths, limit)), KEYS) * KEYS
        pieces = _ceil(lengths, sizes)
        owners = np.repeat(np.arange(len(pieces)), pieces)
        numbers = flatten_ranges(np.zeros_like(pieces), pieces)
        firsts = self.firsts[owners] + numbers * sizes[owners]
        stops = np.minimum(firsts + sizes[owners], self.stops[owners])
        order = np.lexsort((firsts - stops, self.large[owners]))
        owners, numbers, firsts, stops = owners[order], numbers[order], firsts[order], stops[order]
        counts = self.counts[owners]
        entries = flatten_ranges(self.at[owners], self.at[owners] + counts)
        return _Tasks(
            at=np.cumsum(counts) - counts,
            counts=counts,
            firsts=firsts,
            stops=stops,
            sequences=self.sequences[owners],
            large=self.large[owners],
            rows=self.rows[entries],
            entries=entries,
            pieces=pieces[owners],
            numbers=numbers,
        )

    def places(self, num_rows: int, *, whole: bool = True) -> tuple[Slots, Slots, int]:
        """Where each of `rows` stores its part, the merges `[m, 3]`, and the number of parts. A row of one part has no
        place if it may be `whole`."""
        by_entry = np.zeros(int(self.entries.max(initial=-1)) + 1, dtype=np.int64)
        row_of = np.zeros_like(by_entry)
        by_entry[self.entries], row_of[self.entries] = np.repeat(self.pieces, self.counts), self.rows
        parts = np.bincount(row_of, weights=by_entry, minlength=num_rows).astype(np.int64)
        several = np.flatnonzero(parts > whole)
        if not len(several):
            return np.full(len(self.rows), -1, dtype=np.int64), np.zeros((0, 3), dtype=np.int64), 0
        begins = np.full(num_rows, -1, dtype=np.int64)
        begins[several] = np.cumsum(parts[several]) - parts[several]
        order = np.argsort(row_of, kind="stable")
        ends = np.cumsum(by_entry[order])
        first_of_row = np.concatenate(([0], np.cumsum(parts)))[row_of[order]]
        before = np.zeros_like(by_entry)
        before[order] = ends - by_entry[order] - first_of_row
        places = begins[self.rows] + before[self.entries] + np.repeat(self.numbers, self.counts)
        merges = np.stack((several, begins[several], parts[several]), axis=1)
        return np.where(begins[self.rows] >= 0, places, -1), merges, int(parts[several].sum())


def _tasks(batch: PagedBatch, starts: Slots, contexts: Slots, sees: _Sight, blocks: Blocks, name: Hashable) -> _Tasks:
    """Tasks before they are cut. `name` says which attention of a batch this is; None: runs that sequences share are
    read by each of them."""
    counts = np.diff(starts)
    done = np.zeros_like(contexts)
    shared: list[tuple[Slots, int, int, int]] = []
    if len(counts) > 1 and name is not None:
        full = (contexts - counts) // batch.page_size
        late = np.concatenate(([0], np.cumsum(sees.lows > 0)))  # a window has moved past the first token
        full = np.where((counts == 0) | (late[starts[1:]] > late[starts[:-1]]), 0, full)
        for members, first, stop in batch.shared_runs(full, name):
            rows = flatten_ranges(starts[members], starts[members + 1])
            shared.append((rows, first * batch.page_size, stop * batch.page_size, int(members[0])))
            done[members] = stop * batch.page_size
    per = np.where(counts <= blocks.small, blocks.small, blocks.large)
    num = -(-counts // per)
    sequences = np.repeat(np.arange(len(counts)), num)
    begins = starts[sequences] + flatten_ranges(np.zeros_like(num), num) * per[sequences]
    ends = np.minimum(begins + per[sequences], starts[sequences + 1])
    found = [_uncut(_EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY, np.zeros(0, dtype=np.bool_), _EMPTY)]
    if len(begins):
        firsts = np.maximum(np.minimum.reduceat(sees.lows, begins), done[sequences])
        stops = np.maximum.reduceat(sees.highs, begins) + 1
        large = counts[sequences] > blocks.small
        found.append(_uncut(begins, ends - begins, firsts, stops, sequences, large, np.arange(starts[-1])))
    for rows, low, high, sequence in shared:
        few = len(rows) <= blocks.small
        at = np.arange(0, len(rows), blocks.small if few else blocks.large)
        lengths = np.diff(np.append(at, len(rows)))
        same = np.ones_like(at)
        found.append(_uncut(at, lengths, same * low, same * high, same * sequence, np.full(len(at), not few), rows))
    offsets = np.cumsum([0, *(len(tasks.rows) for tasks in found)])
    joined = {
        name: np.concatenate([getattr(tasks, name) for tasks in found])
        for name in ("counts", "firsts", "stops", "sequences", "large", "rows", "pieces", "numbers")
    }
    at = np.concatenate([tasks.at + offset for tasks, offset in zip(found, offsets.tolist(), strict=False)])
    return _Tasks(at=at, entries=np.arange(len(joined["rows"])), **joined)


_EMPTY = np.zeros(0, dtype=np.int64)


def _ceil(count: Any, size: Any) -> Any:
    """Pieces of `size` in `count`."""
    return -(-count // size)


def _uncut(
    at: Slots, counts: Slots, firsts: Slots, stops: Slots, sequences: Slots, large: npt.NDArray[np.bool_], rows: Slots
) -> _Tasks:
    ones = np.ones_like(at)
    return _Tasks(at, counts, firsts, stops, sequences, large, rows, np.arange(len(rows)), ones, 0 * ones)
