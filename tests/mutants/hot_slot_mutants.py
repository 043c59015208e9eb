"""Mistakes in the bookkeeping of hot buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.sparse.hot_slots import FoundSlots, HotSlots
from quire.spec.ids import Ids
from tests.mutants.mutants import Patch, mutant


@mutant("hot slots", "a token whose slot was overwritten is read there as if it were still in it")
def overwritten_tokens_stay_in_the_table(patch: Patch) -> None:
    real = HotSlots.swap_in

    def swap_in(hot: HotSlots, index: int, rows: Ids, positions: Ids, newest: Any) -> FoundSlots:
        hot._widen(int(newest.max()) + 2)
        before = hot._slot_of[..., 1:].copy()
        found = real(hot, index, rows, positions, newest)
        after = hot._slot_of[..., 1:]
        after[after == 0] = before[after == 0]
        return found

    patch.setattr(HotSlots, "swap_in", swap_in)


@mutant("hot slots", "the newest token is copied from host memory, where a step may not have written it yet")
def the_newest_token_is_one_of_the_buffer(patch: Patch) -> None:
    real = HotSlots.swap_in
    patch.setattr(HotSlots, "swap_in", lambda hot, index, rows, at, newest: real(hot, index, rows, at, newest + 1))


@mutant("hot slots", "rows that select fewer tokens than others read their first token again for each one they lack")
def tails_are_not_padding(patch: Patch) -> None:
    real = HotSlots.swap_in
    patch.setattr(
        HotSlots, "swap_in", lambda hot, index, rows, at, newest: real(hot, index, rows, np.maximum(at, 0), newest)
    )


@mutant("hot slots", "tokens that were just copied are kept longer than those that are read in every step")
def loads_are_more_recent_than_hits(patch: Patch) -> None:
    real = HotSlots._advance_clock
    patch.setattr(HotSlots, "_advance_clock", lambda hot, index: real(hot, index)[::-1])


@mutant("hot slots", "slots are overwritten in the order of the last sort, although some were used since")
def slots_used_since_the_sort_are_overwritten(patch: Patch) -> None:
    real = HotSlots._least_recent

    def least_recent(hot: HotSlots, index: int, rows: Any, counts: Any, hit: int) -> Any:
        hot._sorted_at[index] = hit - 1
        return real(hot, index, rows, counts, hit)

    patch.setattr(HotSlots, "_least_recent", least_recent)


@mutant("hot slots", "where a sort is needed, the tokens that the step has found are the first to be overwritten next")
def a_sort_ranks_what_the_call_hit(patch: Patch) -> None:
    real = HotSlots._sort
    patch.setattr(HotSlots, "_sort", lambda hot, index, rows, hit: real(hot, index, rows, hit + 2))


@mutant("hot slots", "a table that has grown lacks what the buffers have, and each token is copied again")
def a_wider_table_is_empty(patch: Patch) -> None:
    def widen(hot: HotSlots, width: int) -> None:
        if width > hot._slot_of.shape[-1]:
            hot._slot_of = np.zeros((*hot._slot_of.shape[:2], width), dtype=np.int16)

    patch.setattr(HotSlots, "_widen", widen)


@mutant("hot slots", "a request reads tokens of the one that had its row before")
def the_table_outlives_its_request(patch: Patch) -> None:
    real = HotSlots.clear

    def clear(hot: HotSlots, rows: Ids) -> None:
        before = hot._slot_of.copy()
        real(hot, rows)
        hot._slot_of = before

    patch.setattr(HotSlots, "clear", clear)


@mutant("hot slots", "slots of a row that begins again are overwritten in an order of the request before")
def the_order_outlives_its_request(patch: Patch) -> None:
    real = HotSlots.clear

    def clear(hot: HotSlots, rows: Ids) -> None:
        before = hot._stamp.copy()
        real(hot, rows)
        hot._stamp = before

    patch.setattr(HotSlots, "clear", clear)
