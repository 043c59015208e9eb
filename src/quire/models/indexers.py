"""The common part of attention that selects: an indexer's keys in the pools, and which rows select at all.

The model's own code selects, on tiles of a step. A sequence whose context is no longer than the number of selected
tokens reads all of it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import PagedBatch
from quire.kernels.fields import PagedField
from quire.kernels.slots import Slots
from quire.kernels.tiles import SelectingRows, Tile, tiles_of
from quire.models.forward import Forward, RecordingForward
from quire.upload import to_device


class IndexKeys:
    """The keys of a tile's sequences, in the form of an indexer's cache: it stores new ones and reads all.

    Rows that see too few tokens to select from only store their keys, and read one key.
    """

    def __init__(self, stored: PagedField, slots: Tensor, tile: Tile) -> None:
        self._stored = stored
        self._slots = slots
        self.tile = tile
        self.selects = len(tile.slots) > 0

    def update(self, keys: Tensor) -> Tensor:
        """Store `keys` `[sequences, count, dim]` of the rows; returns `[sequences, width, dim]`, these included."""
        self._stored.write(self._slots[self.tile.rows.flatten()], keys.flatten(0, 1))
        if not self.selects:
            return keys[:, :1]
        found = self._stored.gather(self.tile.slots, keys.dtype, "index_k")
        return found.view(keys.shape[0], self.tile.width, -1)

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """`update` in DSA's form: `cache.update_indexer(keys, layer)`."""
        return self.update(keys)

    @property
    def layers(self) -> IndexKeys:
        """For MiniMax-M3, which calls `cache.layers[layer].update_index(keys)`."""
        return self

    def __getitem__(self, layer_idx: int) -> IndexKeys:
        return self

    def update_index(self, keys: Tensor) -> Tensor:
        """`update` of keys `[sequences, 1, count, dim]`."""
        return self.update(keys[:, 0]).unsqueeze(1)


def index_keys(forward: Forward, most: int, device: torch.device) -> list[IndexKeys]:
    """The tiles in which an indexer that selects `most` tokens computes the next call. A dry run has none."""
    if isinstance(forward, RecordingForward):
        return []
    stored, batch = forward.rows("index_k", forward.ordinal)
    batch.refuse_trees("attention with an indexer")
    tiles = batch.derived(("tiles", most), lambda batch: _tiles(batch, most, device))
    return [IndexKeys(stored, batch.slots_on(device), tile) for tile in tiles]


def _tiles(batch: PagedBatch, most: int, device: torch.device) -> list[Tile]:
    """Tiles of the rows that select among more than `most` tokens, and one of the others, which only store keys."""
    short, long = by_length(batch, most)
    tiles = tiles_of(batch, long, 1, device)
    if len(short):
        rows = to_device(batch.part(short)[0], device).unsqueeze(0)
        visible = torch.ones(1, rows.shape[1], 1, dtype=torch.bool, device=device)
        tiles.append(Tile(rows, torch.zeros_like(rows), rows.new_zeros(0), visible, 1))
    return tiles


RowSplit = tuple[tuple[Tensor, PagedBatch] | None, SelectingRows | None]
"""The rows that read all of their context, with a batch of their own, and those that read selected tokens."""


def split_rows(batch: PagedBatch, most: int, device: torch.device) -> RowSplit:
    """Which rows of a step read at most `most` tokens anyway, and which select as many."""
    return batch.derived(("split", most), lambda batch: _split(batch, most, device))


def _split(batch: PagedBatch, most: int, device: torch.device) -> RowSplit:
    short, long = by_length(batch, most)
    whole = None
    if len(short):
        rows, part = batch.part(short)
        whole = to_device(rows, device), part
    return whole, SelectingRows(batch, long, 1, device) if len(long) else None


DecodingSplit = tuple[tuple[Tensor, PagedBatch] | None, tuple[Tensor, PagedBatch] | None]
"""The rows of sequences with one new token, and those of the others, each with a batch of their own."""


def split_decoding(batch: PagedBatch, device: torch.device) -> DecodingSplit:
    """Which rows of a step read hot buffers, and which read pages."""

    def split(batch: PagedBatch) -> DecodingSplit:
        counts = np.diff(batch.query_starts)
        parts = []
        for sequences in (np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)):
            rows, part = batch.part(sequences)
            parts.append((to_device(rows, device), part) if len(sequences) else None)
        return parts[0], parts[1]

    return batch.derived("decoding", split)


def by_length(batch: PagedBatch, most: int, ratio: int = 1) -> tuple[Slots, Slots]:
    """The sequences with rows whose context has no more than `most` entries of `ratio` tokens, and the others."""
    present = np.diff(batch.query_starts) > 0
    short = batch.context_lens // ratio <= most
    return np.flatnonzero(present & short), np.flatnonzero(present & ~short)
