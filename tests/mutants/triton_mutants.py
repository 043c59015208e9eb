"""Mistakes in the Triton kernels and in how their tasks are made: changes to a module's source, which runs apart."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire.engine.device.page_tables import DevicePageTables
from quire.kernels.page_arrays import StepTable, _Kept
from quire.memory.residency import PageTableChanges
from tests.mutants.mutants import Patch, mutant

_FOLDER = tempfile.TemporaryDirectory(prefix="quire-mutants-")
"""Until the process ends: the interpreter reads the source of a kernel when it first runs."""


def _load(module: str, name: str, right_text: str, wrong_text: str) -> Any:
    """The module `quire.kernels.triton.<module>` with another text."""
    original = import_module(f"quire.kernels.triton.{module}")
    text = Path(str(original.__file__)).read_text()
    assert text.count(right_text) == 1, f"the source of {name} has changed"
    path = Path(_FOLDER.name) / f"{name}.py"
    path.write_text(text.replace(right_text, wrong_text))
    spec = spec_from_file_location(f"tests.mutants.loaded.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def _changed(
    module: str, replaced: tuple[str, ...], name: str, wrong: str, right_text: str, wrong_text: str
) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        pytest.importorskip("triton")
        from quire.kernels.triton import attention

        loaded = _load(module, name, right_text, wrong_text)
        for each in replaced:
            patch.setattr(attention, each, getattr(loaded, each))

    apply.__name__ = name
    return mutant("triton", wrong)(apply)


def _kernel(name: str, wrong: str, right_text: str, wrong_text: str) -> Callable[[Patch], None]:
    return _changed("attend", ("attend_tasks", "merge_parts"), name, wrong, right_text, wrong_text)


def _tasks(name: str, wrong: str, right_text: str, wrong_text: str) -> Callable[[Patch], None]:
    return _changed("tasks", ("plan_tasks",), name, wrong, right_text, wrong_text)


a_row_sees_the_token_after_it = _kernel(
    "a_row_sees_the_token_after_it",
    "on a GPU a row of a prompt sees the token after it",
    "seen = there[None, :] & (at >= low[:, None]) & (at <= high[:, None])",
    "seen = there[None, :] & (at >= low[:, None]) & (at <= high[:, None] + 1)",
)
_kernel(
    "a_page_is_found_without_its_offset",
    "all tokens of a page are its first one",
    "tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64), position % PAGE",
    "tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64), 0 * position",
)
_kernel(
    "frames_of_values_are_those_of_keys",
    "on a GPU values are read at the distances of keys",
    "v = read_tile(value, value_frame,",
    "v = read_tile(value, key_frame,",
)
_kernel(
    "drafts_of_a_gpu_see_their_siblings",
    "a kernel on a GPU lets a draft see drafts of other branches",
    "| (asked & follows)",
    "| asked",
)
_kernel(
    "query_heads_share_a_row",
    "the heads of a group read the query of its first one",
    "queries = query + row * query_row + head * query_head",
    "queries = query + row * query_row + kv_head * GROUP * query_head",
)
_kernel(
    "a_larger_score_scales_nothing",
    "on a GPU, what was added before a larger score came keeps its weight",
    "weight.to(DTYPE), acc * kept[:, None]",
    "weight.to(DTYPE), acc * 1.0",
)
_kernel(
    "parts_count_alike",
    "parts of a long context that a GPU computes apart are merged as if their largest scores were equal",
    "weight, kept = tl.exp(score - base), tl.exp(before - base)",
    "weight, kept = tl.exp(score - score), tl.exp(before - base)",
)
_kernel(
    "merged_rows_have_no_sink",
    "a sink takes no weight in rows of several parts",
    "total += tl.exp(tl.load(sinks + head + tl.arange(0, 1)) - base)",
    "total += 0.0 * base",
)
_kernel(
    "parts_take_the_sink_too",
    "a sink takes its weight once for each part of a row",
    "total += tl.where(place < 0, sink, 0.0)",
    "total += sink",
)
_tasks(
    "windows_on_a_gpu_are_a_token_long",
    "a kernel on a GPU reads one token beyond the window of a row",
    "np.maximum(positions - window + 1, 0)",
    "np.maximum(positions - window, 0)",
)
_tasks(
    "chunks_of_a_gpu_begin_late",
    "on a GPU a row does not see the first token of its chunk",
    "lows = positions // window * window",
    "lows = positions // window * window + (positions % window > 0)",
)
_tasks(
    "windows_of_drafts_count_rows",
    "a window over drafts that branch counts rows in place of depths",
    "positions = highs if trees is None else pasts + trees.depths",
    "positions = highs",
)
_tasks(
    "a_shared_run_is_read_twice_on_a_gpu",
    "tokens of a shared run count twice on a GPU",
    "done[members] = stop * batch.page_size",
    "done[members] = first * batch.page_size",
)
_tasks(
    "pieces_of_a_gpu_share_a_place",
    "the pieces of a long context overwrite each other's results on a GPU",
    "+ np.repeat(self.numbers, self.counts)",
    "+ 0 * np.repeat(self.numbers, self.counts)",
)
_tasks(
    "the_last_piece_is_cut_off",
    "the last keys of a long context are read by no piece",
    "stops = np.minimum(firsts + sizes[owners], self.stops[owners])\n        order",
    "stops = np.minimum(firsts + sizes[owners], self.stops[owners] - (numbers > 0))\n        order",
)
_tasks(
    "pieces_overlap",
    "the first key of a piece counts twice",
    "stops = np.minimum(firsts + sizes[owners], self.stops[owners])\n        order",
    "stops = np.minimum(firsts + sizes[owners] + 1, self.stops[owners])\n        order",
)


# -- moves


def _moves(name: str, killer: str, wrong: str, right_text: str, wrong_text: str) -> None:
    def apply(patch: Patch) -> None:
        pytest.importorskip("triton")
        from quire.kernels.triton import moves

        patch.setattr(moves, "TritonMoves", _load("moves", name, right_text, wrong_text).TritonMoves)

    apply.__name__ = name
    mutant(killer, wrong)(apply)


_moves(
    "groups_have_the_tables_of_the_first",
    "table entries",
    "on a GPU a layer with a window reads the frames of layers without",
    "tl.store(tables + group * group_entries + place, frame, mask=inside)",
    "tl.store(tables + 0 * group + place, frame, mask=inside)",
)
_moves(
    "all_groups_get_the_frames_of_the_first",
    "table entries",
    "on a GPU the frames of one group are set in the page tables of all",
    "tl.load(changes + (group + 1) * count + at, mask=inside, other=0)",
    "tl.load(changes + count + 0 * group + at, mask=inside, other=0)",
)
_moves(
    "more_entries_are_set_than_changed",
    "table entries",
    "the first page of a request on a GPU is overwritten by whatever follows the changes in memory",
    "    inside = at < count\n    place",
    "    inside = at < count + 1\n    place",
)
_moves(
    "changes_of_many_requests_are_cut_off",
    "table entries",
    "of many changes of page tables only the first few hundred reach the GPU",
    "set_table_entries[(triton.cdiv(count, _ENTRIES), groups)]",
    "set_table_entries[(1, groups)]",
)

_moves(
    "all_frames_are_the_first",
    "moves",
    "on a GPU every frame that is saved has the bytes of the frame of padding",
    "row // ENTRIES * tl.load(table + 1)",
    "0 * row * tl.load(table + 1)",
)
_moves(
    "a_moved_entry_is_the_first_of_its_frame",
    "moves",
    "on a GPU an accepted draft is moved to the first token of its page",
    "row % ENTRIES * tl.load(table + 2)",
    "0 * row * tl.load(table + 2)",
)
_moves(
    "frames_of_pieces_lie_side_by_side",
    "moves",
    "on a GPU a page that is saved has the bytes of other fields",
    "row // ENTRIES * tl.load(table + 1)",
    "row // ENTRIES * ENTRIES * tl.load(table + 2)",
)
_moves(
    "large_pieces_are_cut_off",
    "moves",
    "of large pages only the first kilobytes of a layer are saved from a GPU",
    "(len(rows), len(pieces.table), triton.cdiv(pieces.widest, n))",
    "(len(rows), len(pieces.table), 1)",
)
_moves(
    "all_fields_go_to_the_begin_of_a_record",
    "moves",
    "saved layers overwrite each other in their record",
    "records + index * record_words + tl.load(table + 3)",
    "records + index * record_words + 0 * tl.load(table + 3)",
)
_moves(
    "a_small_piece_is_as_wide_as_the_widest",
    "moves",
    "loading the pages of one layer on a GPU overwrites the begin of the next",
    "    inside = at < words\n    if GATHER:",
    "    inside = at < words + 1\n    if GATHER:",
)
_moves(
    "rows_are_moved_one_by_one",
    "moves",
    "an accepted draft is moved over one that is still to be moved",
    "        self.gather(pieces, sources, records)\n        self.scatter(pieces, targets, records)",
    "        for at in range(len(sources)):\n"
    "            self.gather(pieces, sources[at : at + 1], records[at : at + 1])\n"
    "            self.scatter(pieces, targets[at : at + 1], records[at : at + 1])",
)


@mutant("moves", "a GPU loads from an address that it cannot load from, and ends the engine")
def pieces_are_taken_for_aligned(patch: Patch) -> None:
    from quire.kernels import moves

    patch.setattr(moves, "_VECTOR", 8)


_moves(
    "a_token_is_the_first_of_its_page",
    "swapped entries",
    "hot buffers on a GPU get the first token of each page that is read",
    "+ tl.load(places + index) * entry",
    "+ 0 * tl.load(places + index) * entry",
)
_moves(
    "tokens_are_swapped_in_in_order",
    "swapped entries",
    "tokens from host memory go to the first slots of a hot buffer, which others are in",
    "tl.load(table + 2) + target // ENTRIES * tl.load(table + 3) + target % ENTRIES * entry",
    "tl.load(table + 2) + index * entry",
)
_moves(
    "frames_of_hot_buffers_lie_side_by_side",
    "swapped entries",
    "tokens from host memory are written over other fields of a hot buffer",
    "target // ENTRIES * tl.load(table + 3)",
    "target // ENTRIES * ENTRIES * entry",
)
_moves(
    "only_the_first_field_is_swapped_in",
    "swapped entries",
    "rotary keys or scales in a hot buffer are those of the token before",
    "(len(targets), len(table), triton.cdiv(words, n))",
    "(len(targets), 1, triton.cdiv(words, n))",
)
_moves(
    "a_swapped_token_is_cut_off",
    "swapped entries",
    "the end of a wide entry is not swapped in",
    "    inside = at < words\n    tl.store(into",
    "    inside = at < words - 1\n    tl.store(into",
)

_moves(
    "a_first_state_is_that_of_padding",
    "moved states",
    "on a GPU a prompt begins with the state that padding has left",
    "there = tl.where(row != 0, numbers, 0)",
    "there = numbers",
)
_moves(
    "states_are_read_in_order",
    "moved states",
    "on a GPU requests go on from the states of the first frames of the pool",
    "tl.load(layer + row * layer_row + at, mask=at < there",
    "tl.load(layer + index * layer_row + at, mask=at < there",
)
_moves(
    "states_are_written_in_order",
    "moved states",
    "on a GPU states are written over those of the first frames of the pool",
    "tl.store(layer + row * layer_row + at",
    "tl.store(layer + index * layer_row + at",
)
_moves(
    "large_states_are_cut_off",
    "moved states",
    "of a large state only the first numbers are stored on a GPU",
    "write_rows[(len(targets), triton.cdiv(numbers, n))]",
    "write_rows[(len(targets), 1)]",
)


@mutant("page tables", "after a step that failed, others read frames that page tables on the device have not")
def changes_of_a_failed_step_are_lost(patch: Patch) -> None:
    real = DevicePageTables.sent

    def sent(self: DevicePageTables, changes: PageTableChanges) -> Tensor | None:
        self._pending = self._pending[:0]
        return real(self, changes)

    patch.setattr(DevicePageTables, "sent", sent)


@mutant("page tables", "requests go on to read a page together after one of them has got another one")
def shared_runs_do_not_follow_changes(patch: Patch) -> None:
    patch.setattr(StepTable, "has_changed", lambda self, full_pages: False)


@mutant("page tables", "requests that share no page are computed as those that ran before in their places did")
def shared_runs_are_of_places_in_the_batch(patch: Patch) -> None:
    patch.setattr(
        _Kept, "hold", lambda self, table, full: len(table.rows) == len(self.rows) and not table.has_changed(full)
    )


@mutant("page tables", "runs are kept that were found many steps ago, with other pages")
def shared_runs_are_kept_over_steps(patch: Patch) -> None:
    real = _Kept.hold
    patch.setattr(_Kept, "hold", lambda self, table, full: real(replace(self, number=table.number), table, full))


# -- writes


def _write(name: str, wrong: str, right_text: str, wrong_text: str) -> None:
    def apply(patch: Patch) -> None:
        pytest.importorskip("triton")
        from quire.kernels.triton import write

        patch.setattr(write, "write_rows", _load("write", name, right_text, wrong_text).write_rows)

    apply.__name__ = name
    mutant("triton writes", wrong)(apply)


_write(
    "scales_have_no_heads",
    "the scales of all heads are stored over those of the first",
    "scale_token)[:, None] + head * scale_head + block[None, :]",
    "scale_token)[:, None] + 0 * head + block[None, :]",
)
_write(
    "scales_are_as_far_apart_as_entries",
    "scales of a page are written over other fields of the one before",
    "frame * scale_frame + offset",
    "frame * ENTRIES * scale_token + offset",
)
_write(
    "written_frames_lie_side_by_side",
    "on a GPU tokens of a page are written over other fields of the one before",
    "frame * frame_stride + offset",
    "frame * ENTRIES * token + offset",
)
_write(
    "rows_go_to_slots_in_order",
    "encoded rows are stored in the first slots of the pool, which are other tokens'",
    "place = rows + (frame * frame_stride + offset * token)[:, None] + head * head_stride",
    "place = rows + (row * token)[:, None] + head * head_stride",
)
_write(
    "a_new_row_is_exact",
    "on a GPU a token is exact in the step that computes it and rounded after it",
    "        number = number.to(source.dtype.element_ty)\n",
    "        number = given\n",
)
