"""IndexKeys: the keys by which an indexer selects tokens, on the pools, as an indexer of the model takes its cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import PagedBatch
from quire.kernels.pieces import Piece, pieces_of
from quire.kernels.segments import Slots
from quire.kernels.stored import StoredRows


class IndexKeys:
    """Stores the keys of a piece's rows and gives those of their sequences for them.

    Rows that see too few tokens to choose from only store theirs, and are given one key to be done with.
    """

    def __init__(self, stored: StoredRows, slots: Tensor, piece: Piece) -> None:
        self._stored = stored
        self._slots = slots
        self._piece = piece
        self.given = len(piece.slots) > 0

    def update(self, keys: Tensor) -> Tensor:
        """`keys` `[sequences, count, dim]` of the rows, in exchange for `[sequences, width, dim]`, theirs included."""
        self._stored.write(self._slots[self._piece.rows.flatten()], keys.flatten(0, 1))
        if not self.given:
            return keys[:, :1]
        found = self._stored.gather(self._piece.slots, keys.dtype, "index_k")
        return found.view(keys.shape[0], self._piece.width, -1)


def by_length(batch: PagedBatch, most: int) -> tuple[Slots, Slots]:
    """The sequences with rows whose context is no longer than `most` tokens, and the others."""
    present = np.diff(batch.query_starts) > 0
    short = batch.context_lens <= most
    return np.flatnonzero(present & short), np.flatnonzero(present & ~short)


def indexed_pieces(batch: PagedBatch, most: int, device: torch.device) -> list[Piece]:
    """The rows of a step as an indexer takes them: those that select among more than `most` tokens, and one piece of
    the others, which only store keys.
    """
    short, long = by_length(batch, most)
    pieces = pieces_of(batch, long, 1, device)
    if len(short):
        rows = torch.from_numpy(batch.part(short)[0]).to(device).unsqueeze(0)
        visible = torch.ones(1, rows.shape[1], 1, dtype=torch.bool, device=device)
        pieces.append(Piece(rows, torch.zeros_like(rows), rows.new_zeros(0), visible, 1))
    return pieces
