"""Tiles of a step: rows that are computed together against one list of entries per sequence, without a plan.

An entry covers `per` tokens (1: it is a token), and a row at position p sees the complete entries of tokens up to p:
`(p + 1) // per` of them. Sequences with the same few new tokens share tiles, padded to the longest; the rows of another
sequence are tiles of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels import segments
from quire.kernels.batch import PagedBatch
from quire.kernels.segments import Slots
from quire.upload import to_device

MAX_PAIRS = 1 << 16
"""Pairs of a row and an entry in one tile."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """`count` rows of each of some sequences, and the `width` entries of each, padded with a masked one."""

    rows: Tensor  # [sequences, count] of the flat batch
    positions: Tensor  # [sequences, count] of the rows
    slots: Tensor  # [sequences * width] of the entries
    visible: Tensor  # [sequences, count, width] which entries a row sees
    width: int


def tiles_of(batch: PagedBatch, sequences: Slots, per: int, device: torch.device) -> list[Tile]:
    """The tiles of those of `sequences` with rows and entries; for one sequence, in the order of its rows."""
    new, contexts = np.diff(batch.query_starts).astype(np.int64), batch.context_lens.astype(np.int64)
    sequences = sequences[(new[sequences] > 0) & (contexts[sequences] >= per)]
    return [
        _tile(batch, members, stops, count, per, device)
        for members, stops, count in _cuts(new, contexts, sequences, per)
    ]


def _cuts(new: Slots, contexts: Slots, sequences: Slots, per: int) -> Iterator[tuple[Slots, Slots, int]]:
    """(sequences, stops, count): the `count` rows before position `stops[i]` of each."""
    entries = contexts // per
    few = (new <= segments.MAX_BATCHED_ROWS) & (new * entries <= MAX_PAIRS)
    for count in np.unique(new[sequences[few[sequences]]]).tolist():
        alike = sequences[few[sequences] & (new[sequences] == count)]
        alike = alike[np.argsort(contexts[alike], kind="stable")]
        while len(alike):
            fits = np.arange(1, len(alike) + 1) * count * entries[alike] <= MAX_PAIRS
            size = len(alike) if fits.all() else int(fits.argmin())
            yield alike[:size], contexts[alike[:size]], count
            alike = alike[size:]
    for sequence in sequences[~few[sequences]].tolist():
        stop = int(contexts[sequence])
        size = max(1, MAX_PAIRS // int(entries[sequence]))
        for start in range(stop - int(new[sequence]), stop, size):
            end = min(start + size, stop)
            if end >= per:
                yield np.array([sequence]), np.array([end]), end - start


def _tile(batch: PagedBatch, sequences: Slots, stops: Slots, count: int, per: int, device: torch.device) -> Tile:
    entries = stops // per
    width = int(entries.max())
    last = batch.query_starts[sequences + 1].astype(np.int64) - (batch.context_lens[sequences] - stops)
    offsets = np.arange(-count, 0)
    positions = stops[:, None] + offsets
    columns = np.minimum(np.arange(width), entries[:, None] - 1)
    slots = entry_slots(batch, sequences[:, None], columns, per)
    visible = np.arange(width) < (positions[:, :, None] + 1) // per
    rows, index = last[:, None] + offsets, slots.reshape(-1)
    return Tile(
        to_device(rows, device),
        to_device(positions, device),
        to_device(index, device),
        to_device(visible, device),
        width,
    )


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
        """Of the flat batch, int64."""
        owners = np.repeat(np.arange(len(sequences)), np.diff(part.query_starts))
        self._owners = to_device(owners, device).unsqueeze(1)
        self._frames = to_device(part.frames.astype(np.int64), device)
        self._in_page = batch.page_size // per

    def slots_of(self, entries: Tensor) -> Tensor:
        """Slots of the `entries` int64 `[rows, n]` that each row selected."""
        frames = self._frames[self._owners, entries // self._in_page]
        return frames * self._in_page + entries % self._in_page
