"""Mistakes in what rows of a tile read and see."""

from __future__ import annotations

import numpy as np

from quire.kernels import tiles
from quire.kernels.batch import PagedBatch
from quire.kernels.page_arrays import Trees
from quire.kernels.slots import Slots
from quire.kernels.tiles import _Cutting
from quire.spec.ids import Bools
from tests.mutants.mutants import Patch, mutant


@mutant("tiles", "a sequence goes on reading the frame of a page that another sequence has now")
def pages_are_those_of_the_first_sequence(patch: Patch) -> None:
    real = tiles.entry_slots

    def entry_slots(batch: PagedBatch, sequences: Slots, entries: Slots, per: int) -> Slots:
        return real(batch, sequences * 0 + sequences.min(), entries, per)

    patch.setattr(tiles, "entry_slots", entry_slots)


@mutant("tiles", "columns without a token read memory that was never written, and all is NaN")
def padding_is_read_from_nowhere(patch: Patch) -> None:
    real = tiles.entry_slots

    def entry_slots(batch: PagedBatch, sequences: Slots, entries: Slots, per: int) -> Slots:
        found = real(batch, sequences, entries, per)
        found[:, 1:][np.diff(entries, axis=1) == 0] = 0
        return found

    patch.setattr(tiles, "entry_slots", entry_slots)


@mutant("tiles", "a row of a window does not see the oldest token in it")
def windows_are_a_token_short(patch: Patch) -> None:
    real = _Cutting._lows

    def lows(cutting: _Cutting, sequences: Slots, firsts: Slots) -> Slots:
        found = real(cutting, sequences, firsts)
        return found + (found > 0)

    patch.setattr(_Cutting, "_lows", lows)


@mutant("tiles", "rows behind the first of a tile see tokens that have left their window")
def a_tile_has_one_window(patch: Patch) -> None:
    real = _Cutting._in_window

    def in_window(cutting: _Cutting, positions: Slots, keys: Slots) -> Bools:
        return real(cutting, positions[:, :1], keys)

    patch.setattr(_Cutting, "_in_window", in_window)


@mutant("tiles", "a draft sees the draft that follows it")
def rows_see_one_token_too_far(patch: Patch) -> None:
    real = _Cutting._complete
    patch.setattr(_Cutting, "_complete", lambda cutting, places, entries: real(cutting, places + 1, entries))


@mutant("tiles", "a draft sees drafts of other branches")
def rows_see_other_branches(patch: Patch) -> None:
    patch.setattr(Trees, "sight", lambda trees, rows, numbers: np.bool_(True))
