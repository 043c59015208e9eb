"""Mistakes with plans of attention that are kept between steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quire.kernels.planner import _CachedPlan
from quire.kernels.segments import Sequences, Slots
from quire.kernels.tails import Tails, _Cells
from quire.spec.ids import Bools
from tests.mutants.mutants import Patch, mutant


@mutant("plans", "a sequence does not see the tokens it has computed since its plan was made")
def tails_are_not_shown(patch: Patch) -> None:
    real = _Cells.show

    def show(cells: _Cells, at: Slots, slots: Slots) -> None:
        hidden = cells.mask[at]
        real(cells, at, slots)
        cells.mask[at] = hidden

    patch.setattr(_Cells, "show", show)


@mutant("plans", "a sequence goes on reading the frame that one of its pages has left")
def changed_pages_are_not_noticed(patch: Patch) -> None:
    real = _CachedPlan._changed

    def changed(kept: _CachedPlan, before: Sequences) -> Bools:
        kept.known = kept.rows.frames.copy()
        return real(kept, before)

    patch.setattr(_CachedPlan, "_changed", changed)


@mutant("plans", "sequences go on sharing a prefix with whoever has the place of one that left")
def sharing_outlives_who_shares(patch: Patch) -> None:
    real = _CachedPlan._share

    def share(kept: _CachedPlan, seqs: Sequences) -> None:
        if not kept.runs or len(kept.done) != len(seqs.ids):
            real(kept, seqs)
        full = (seqs.contexts - seqs.queries) // seqs.page_size * seqs.page_size
        kept.done = np.maximum(np.minimum(kept.done, full), seqs.lows)

    patch.setattr(_CachedPlan, "_share", share)


@mutant("plans", "a sequence that gave up its last tokens still sees them")
def a_shorter_context_is_not_noticed(patch: Patch) -> None:
    for name in ("_changed", "_append"):
        real = getattr(_CachedPlan, name)

        def step(kept: _CachedPlan, before: Sequences, *others: Bools, real: Any = real) -> Any:
            return real(kept, replace(before, contexts=np.minimum(before.contexts, kept.rows.contexts)), *others)

        patch.setattr(_CachedPlan, name, step)


@mutant("plans", "columns without a token read what nobody wrote, and all is NaN")
def padding_is_read_from_nowhere(patch: Patch) -> None:
    real = _Cells.send

    def send(cells: _Cells, part: slice) -> None:
        cells.index[part][cells.mask[part] < 0] = 0
        real(cells, part)

    patch.setattr(_Cells, "send", send)


@mutant("plans", "a draft sees the draft that follows it")
def rows_see_one_token_too_far(patch: Patch) -> None:
    real = Tails.show_rows
    patch.setattr(Tails, "show_rows", lambda tails, contexts: real(tails, contexts + 1))


@mutant("plans", "where the device has its own copy of a plan, it never hears of new tokens")
def the_device_is_not_told(patch: Patch) -> None:
    def show(cells: _Cells, at: Slots, slots: Slots) -> None:
        cells.index[at] = slots
        cells.mask[at] = 0

    patch.setattr(_Cells, "show", show)
