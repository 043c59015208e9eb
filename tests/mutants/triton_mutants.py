"""Mistakes in the Triton kernels and in how their tasks are made: changes to a module's source, which runs apart."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

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
    "* PAGE + position % PAGE",
    "* PAGE + 0 * position",
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
    "weight, acc = weight.to(DTYPE), acc * kept[:, None]",
    "weight, acc = weight.to(DTYPE), acc * 1.0",
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
    "done[members] = stop * arrays.page_size",
    "done[members] = first * arrays.page_size",
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
    "places = scales + (slot * scale_token)[:, None] + head * scale_head + block[None, :]",
    "places = scales + (slot * scale_token)[:, None] + 0 * head + block[None, :]",
)
_write(
    "rows_go_to_slots_in_order",
    "encoded rows are stored in the first slots of the pool, which are other tokens'",
    "places = rows + (slot * token)[:, None] + head * head_stride + at[None, :]",
    "places = rows + (row * token)[:, None] + head * head_stride + at[None, :]",
)
_write(
    "a_new_row_is_exact",
    "on a GPU a token is exact in the step that computes it and rounded after it",
    "        number = number.to(source.dtype.element_ty)\n",
    "        number = given\n",
)
