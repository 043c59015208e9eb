"""Mistakes with latents in host memory: hot buffers, their bookkeeping, copies and reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from quire.kernels.fields import PagedField, SlotIndex
from quire.models.sparse import _SparseAttention
from quire.sparse.coordinator import HiSparseCoordinator
from quire.sparse.hot_slots import HotSlots
from tests.mutants.mutants import Patch, mutant


@mutant("hot buffers", "a slot of a hot buffer still has the token that another was copied over")
def the_first_token_is_not_copied(patch: Patch) -> None:
    real = HiSparseCoordinator._copy

    def copy(self: HiSparseCoordinator, ordinal: int, swapped: Any) -> None:
        sources = tuple(part[1:] for part in swapped.sources)
        real(self, ordinal, replace(swapped, sources=sources, targets=swapped.targets[1:]))

    patch.setattr(HiSparseCoordinator, "_copy", copy)


@mutant("hot buffers", "a hot buffer overwrites the tokens that it needs next")
def the_most_recent_token_is_overwritten(patch: Patch) -> None:
    real = HotSlots._sort

    def sort(self: HotSlots, index: int, rows: Any, hit: int) -> None:
        real(self, index, rows, hit)
        size = self.buffer_size
        self._order[index, rows, :size] = self._order[index, rows, :size][:, ::-1]

    patch.setattr(HotSlots, "_sort", sort)


@mutant("hot buffers", "a token that is copied to a hot buffer is not found there, and is copied again")
def loaded_tokens_are_not_marked(patch: Patch) -> None:
    real = HotSlots.swap_in

    def swap_in(self: HotSlots, index: int, rows: Any, positions: Any, newest: Any) -> Any:
        found = real(self, index, rows, positions, newest)
        self._slot_of[index, found.row, found.position + 1] = 0
        return found

    patch.setattr(HotSlots, "swap_in", swap_in)


@mutant("hot buffers", "a short context reads its last token several times")
def short_rows_repeat_their_last_token(patch: Patch) -> None:
    real = _SparseAttention._positions

    def positions(self: _SparseAttention, selected: Any, batch: Any) -> Any:
        found = real(self, selected, batch)
        return np.where(found < 0, found.max(axis=1, keepdims=True), found)

    patch.setattr(_SparseAttention, "_positions", positions)


@mutant("hot buffers", "a context that is read whole reads the selection of an earlier layer or step")
def short_rows_read_a_selection(patch: Patch) -> None:
    real = _SparseAttention._positions

    def positions(self: _SparseAttention, selected: Any, batch: Any) -> Any:
        found = real(self, selected, batch)
        chosen = selected.cpu().numpy()[:, : found.shape[1]]
        found[:, : chosen.shape[1]] = chosen
        return found

    patch.setattr(_SparseAttention, "_positions", positions)


@mutant("hot buffers", "places without a token are read as the first slot of the buffer")
def padding_is_read(patch: Patch) -> None:
    real = HiSparseCoordinator._plan

    def plan(self: HiSparseCoordinator, *given: Any) -> Any:
        found = real(self, *given)
        return replace(found, hidden=torch.zeros_like(found.hidden))

    patch.setattr(HiSparseCoordinator, "_plan", plan)


@mutant("hot buffers", "the newest token of a step is not in host memory")
def the_newest_token_is_not_backed_up(patch: Patch) -> None:
    real = PagedField._put

    def put(self: PagedField, rows: Any, places: SlotIndex, stored: Any) -> None:
        if self.on_host:
            places, stored = SlotIndex(places.slots[:-1]), stored[:-1]
        real(self, rows, places, stored)

    patch.setattr(PagedField, "_put", put)


@mutant("hot buffers", "a request reads what the one before it left in the hot buffer of its row")
def buffers_are_not_forgotten(patch: Patch) -> None:
    patch.setattr(HotSlots, "clear", lambda self, rows: None)


@mutant("hot buffers", "layers that share an index read hot buffers that only its owner fills")
def shared_layers_are_not_copied(patch: Patch) -> None:
    real = HiSparseCoordinator._copy

    def copy(self: HiSparseCoordinator, ordinal: int, swapped: Any) -> None:
        if ordinal in self._owners:
            real(self, ordinal, swapped)

    patch.setattr(HiSparseCoordinator, "_copy", copy)


@mutant("hot buffers", "the hot buffers of two requests overlap")
def buffers_overlap(patch: Patch) -> None:
    real = HiSparseCoordinator._bases
    patch.setattr(HiSparseCoordinator, "_bases", lambda self, batch: real(self, batch) - batch.ids * self._first_slot)


@mutant("hot buffers", "the newest token is read from the last slot of the buffer")
def the_newest_token_is_in_the_buffer(patch: Patch) -> None:
    real = HiSparseCoordinator.newest
    patch.setattr(HiSparseCoordinator, "newest", lambda self, batch: real(self, batch) - 1)
