"""Mistakes with plans of attention that are kept between steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quire.kernels.planner import _CachedPlan
from quire.kernels.segments import Sequences, Slots
from quire.kernels.suffixes import Suffixes, _Cells
from quire.spec.ids import Bools
from tests.mutants.mutants import Patch, mutant


@mutant("plans", "a sequence does not see the tokens it has computed since its plan was made")
def appended_tokens_are_not_shown(patch: Patch) -> None:
    real = _Cells.write

    def write(cells: _Cells, at: Slots, slots: Slots) -> None:
        hidden = cells.mask[at]
        real(cells, at, slots)
        cells.mask[at] = hidden

    patch.setattr(_Cells, "write", write)


@mutant("plans", "a sequence goes on reading the frame that one of its pages has left")
def changed_pages_are_not_noticed(patch: Patch) -> None:
    real = _CachedPlan._changed

    def changed(plan: _CachedPlan, before: Sequences) -> Bools:
        plan.page_tables = plan.rows.frames.copy()
        return real(plan, before)

    patch.setattr(_CachedPlan, "_changed", changed)


@mutant("plans", "sequences go on sharing a prefix with the sequence that took the place of one that left")
def sharing_outlives_who_shares(patch: Patch) -> None:
    real = _CachedPlan._share

    def share(plan: _CachedPlan, seqs: Sequences) -> None:
        if not plan.runs or len(plan.shared_stops) != len(seqs.ids):
            real(plan, seqs)
        full = (seqs.contexts - seqs.queries) // seqs.page_size * seqs.page_size
        plan.shared_stops = np.maximum(np.minimum(plan.shared_stops, full), seqs.lows)

    patch.setattr(_CachedPlan, "_share", share)


@mutant("plans", "a sequence that gave up its last tokens still sees them")
def a_shorter_context_is_not_noticed(patch: Patch) -> None:
    for name in ("_changed", "_append"):
        real = getattr(_CachedPlan, name)

        def step(plan: _CachedPlan, before: Sequences, *others: Bools, real: Any = real) -> Any:
            return real(plan, replace(before, contexts=np.minimum(before.contexts, plan.rows.contexts)), *others)

        patch.setattr(_CachedPlan, name, step)


@mutant("plans", "columns without a token read memory that was never written, and all is NaN")
def padding_is_read_from_nowhere(patch: Patch) -> None:
    real = _Cells.upload

    def upload(cells: _Cells, part: slice) -> None:
        cells.index[part][cells.mask[part] < 0] = 0
        real(cells, part)

    patch.setattr(_Cells, "upload", upload)


@mutant("plans", "a draft sees the draft that follows it")
def rows_see_one_token_too_far(patch: Patch) -> None:
    real = Suffixes.update_masks
    patch.setattr(Suffixes, "update_masks", lambda suffixes, contexts, *trees: real(suffixes, contexts + 1, *trees))


@mutant("plans", "a draft sees drafts of other branches")
def rows_see_other_branches(patch: Patch) -> None:
    real = Suffixes.update_masks
    patch.setattr(Suffixes, "update_masks", lambda suffixes, contexts, *trees: real(suffixes, contexts))


@mutant("plans", "where the device has its own copy of a plan, it never hears of new tokens")
def the_device_is_not_told(patch: Patch) -> None:
    def write(cells: _Cells, at: Slots, slots: Slots) -> None:
        cells.index[at] = slots
        cells.mask[at] = 0

    patch.setattr(_Cells, "write", write)
