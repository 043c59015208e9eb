"""Tiles of a step: rows that are computed together against one list of entries per sequence.

An entry covers `per` tokens (1: it is a token), and a row at position p sees the complete entries of tokens up to p:
`(p + 1) // per` of them, or those of its window. Sequences with the same few new tokens share tiles, padded to the
longest; the rows of another sequence are tiles of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import PagedBatch
from quire.kernels.slots import Slots
from quire.spec.ids import Bools
from quire.upload import to_device

MAX_PAIRS = 1 << 16
"""Pairs of a row and an entry in one tile."""
MAX_SHARED_ROWS = 32
"""New tokens of a sequence up to which it shares tiles."""
WINDOW_ROWS = 256
"""Rows of a sequence in one tile that read windows: their entries are the window and as many more."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """`count` rows of each of some sequences, and the `width` entries of each, padded with a masked one."""

    rows: Tensor  # [sequences, count] of the flat batch
    positions: Tensor  # [sequences, count] of the rows
    slots: Tensor  # [sequences * width] of the entries
    visible: Tensor  # [sequences, count, width] which entries a row sees
    width: int


def tiles_of(
    batch: PagedBatch,
    sequences: Slots,
    per: int,
    device: torch.device,
    *,
    window: int = 0,
    chunked: bool = False,
    most_pairs: int | None = None,
    most_entries: int | None = None,
) -> list[Tile]:
    """The tiles of those of `sequences` with rows and entries; for one sequence, in the order of its rows.

    `window` and `chunked` as in `paged_attention`, and rows of trees: only if an entry is a token. Several sequences
    share a tile up to `most_entries`; a tile has at most `most_pairs`, by default `MAX_PAIRS`, unless it is one row.
    """
    assert per == 1 or (not window and batch.trees is None)
    pairs = most_pairs or MAX_PAIRS
    cutting = _Cutting(batch, per, window, chunked, pairs, min(most_entries or pairs, pairs))
    return [cutting.tile(members, stops, count, device) for members, stops, count in cutting.cuts(sequences)]


class _Cutting:
    """How one batch is cut into tiles, and what their rows see."""

    def __init__(self, batch: PagedBatch, per: int, window: int, chunked: bool, pairs: int, entries: int) -> None:
        self._batch = batch
        self._per = per
        self._window = window
        self._chunked = chunked
        self._pairs = pairs
        self._entries = entries
        self._pasts, self._contexts = batch.spans()
        self._positions = batch.positions()  # positions of the flat rows

    def _lows(self, sequences: Slots, firsts: Slots) -> Slots:
        """The first entries that rows from position `firsts[i]` on of each sequence read."""
        if not self._window:
            return np.zeros_like(firsts)
        if self._chunked:
            return firsts // self._window * self._window
        trees = self._batch.trees
        if trees is not None:  # a row that follows no other one is at the end of the past
            firsts = np.where(trees.branching[sequences], self._pasts[sequences], firsts)
        return np.maximum(firsts - self._window + 1, 0)

    def cuts(self, sequences: Slots) -> Iterator[tuple[Slots, Slots, int]]:
        """(sequences, stops, count): the `count` rows before position `stops[i]` of each."""
        pasts, contexts = self._pasts, self._contexts
        new = contexts - pasts
        sequences = sequences[(new[sequences] > 0) & (contexts[sequences] >= self._per)]
        entries = contexts // self._per
        entries[sequences] -= self._lows(sequences, pasts[sequences])
        few = (new <= MAX_SHARED_ROWS) & (new * entries <= self._pairs)
        for count in np.unique(new[sequences[few[sequences]]]).tolist():
            alike = sequences[few[sequences] & (new[sequences] == count)]
            alike = alike[np.argsort(entries[alike], kind="stable")]
            while len(alike):
                sizes = np.arange(1, len(alike) + 1) * entries[alike]
                fits = (sizes * count <= self._pairs) & (sizes <= self._entries)
                size = len(alike) if fits.all() else max(1, int(fits.argmin()))
                yield alike[:size], contexts[alike[:size]], count
                alike = alike[size:]
        for sequence in sequences[~few[sequences]].tolist():
            stop, reach, most = int(contexts[sequence]), int(entries[sequence]), self._pairs
            if self._window:
                reach, most = min(reach, self._window + WINDOW_ROWS), WINDOW_ROWS
            size = max(1, min(self._pairs // reach, most))
            for start in range(int(pasts[sequence]), stop, size):
                end = min(start + size, stop)
                if end >= self._per:
                    yield np.array([sequence]), np.array([end]), end - start

    def tile(self, sequences: Slots, stops: Slots, count: int, device: torch.device) -> Tile:
        """The tile of the `count` rows before position `stops[i]` of each sequence."""
        batch, offsets = self._batch, np.arange(-count, 0)
        last = batch.query_starts[sequences + 1].astype(np.int64) - (self._contexts[sequences] - stops)
        rows, places = last[:, None] + offsets, stops[:, None] + offsets
        lows, ends = self._lows(sequences, stops - count), stops // self._per
        width = int((ends - lows).max())
        columns = lows[:, None] + np.arange(width)
        slots = entry_slots(batch, sequences[:, None], np.minimum(columns, ends[:, None] - 1), self._per)
        visible = self._complete(places[:, :, None], columns[:, None, :])
        positions, keys = self._positions[rows], columns
        trees = batch.trees
        if trees is not None and trees.branching[sequences].any():
            visible &= trees.sight(rows, columns - self._pasts[sequences][:, None])
            keys = self._key_positions(sequences, columns)
        if self._window:
            visible &= self._in_window(positions[:, :, None], keys[:, None, :])
        return Tile(
            to_device(rows, device),
            to_device(positions, device),
            to_device(slots.reshape(-1), device),
            to_device(visible, device),
            width,
        )

    def _complete(self, places: Slots, entries: Slots) -> Bools:
        """Which `entries` are of tokens up to `places`, in the order of slots."""
        found: Bools = entries < (places + 1) // self._per
        return found

    def _key_positions(self, sequences: Slots, columns: Slots) -> Slots:
        """Positions of the tokens `columns` `[sequences, n]`: those of new tokens are those of their rows."""
        new = columns - self._pasts[sequences][:, None]
        rows = np.minimum(self._batch.query_starts[sequences][:, None] + np.maximum(new, 0), len(self._positions) - 1)
        return np.where(new < 0, columns, self._positions[rows])

    def _in_window(self, positions: Slots, keys: Slots) -> Bools:
        """Which keys are in the window, or the chunk, of rows at `positions`."""
        if self._chunked:
            found: Bools = keys >= positions // self._window * self._window
        else:
            found = keys > positions - self._window
        return found


def entry_slots(batch: PagedBatch, sequences: Slots, entries: Slots, per: int) -> Slots:
    """Slots of the `entries` of `sequences`, arrays that broadcast, in a field with one entry per `per` tokens."""
    in_page = batch.page_size // per
    frames: Slots = batch.frames[sequences, entries // in_page].astype(np.int64)
    return frames * in_page + entries % in_page


class SelectingRows:
    """The rows of some sequences of a batch, each of which reads entries selected for it alone."""

    def __init__(self, batch: PagedBatch, sequences: Slots, per: int, device: torch.device) -> None:
        rows, part = batch.part(sequences)
        self.rows = to_device(rows, device)
        """Rows of the flat batch, int64."""
        owners = np.repeat(np.arange(len(sequences)), np.diff(part.query_starts))
        self._owners = to_device(owners, device).unsqueeze(1)
        self._frames = to_device(part.frames.astype(np.int64), device)
        self._in_page = batch.page_size // per

    def slots_of(self, entries: Tensor) -> Tensor:
        """Slots of the `entries` int64 `[rows, n]` that each row selected."""
        frames = self._frames[self._owners, entries // self._in_page]
        return frames * self._in_page + entries % self._in_page
