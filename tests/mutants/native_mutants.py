"""Mistakes in the native attention kernel: changes to its source, which is compiled apart."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path

from quire.kernels import backend
from quire.kernels.native import library
from quire.kernels.native.library import Native, build, sources
from tests.mutants.mutants import Patch, mutant


def _changed(name: str, wrong: str, right_text: str, wrong_text: str) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        texts = sources()
        assert texts["attention.cpp"].count(right_text) == 1, f"the source of {name} has changed"
        texts["attention.cpp"] = texts["attention.cpp"].replace(right_text, wrong_text)
        patch.setattr(library, "_FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in library._FLAGS))
        with tempfile.TemporaryDirectory() as folder:
            path = build(texts, Path(folder))
            loaded = ctypes.CDLL(str(path))
        patch.setattr(backend, "native", lambda: Native(loaded, path))

    apply.__name__ = name
    return mutant("native", wrong)(apply)


a_chunk_sees_its_next_token = _changed(
    "a_chunk_sees_its_next_token",
    "a row of a prompt sees the token after it, and the model is conditioned on its own answer",
    "t < low || t > high ?",
    "t < low || t > high + 1 ?",
)
_changed(
    "a_window_is_a_token_long",
    "the native kernel reads one token beyond the window of a row",
    "at - call.window + 1));",
    "at - call.window));",
)
_changed(
    "a_chunk_of_attention_begins_late",
    "a row does not see the first token of its chunk",
    "at / call.window * call.window :",
    "at / call.window * call.window + (at % call.window > 0) :",
)
_changed(
    "drafts_see_their_siblings",
    "the native kernel lets a draft see drafts of other branches",
    "!sees[t - past] ||",
    "false ||",
)
_changed(
    "a_page_is_found_by_its_place",
    "the last page of a block is read beyond its end",
    "std::min(tokens, i + size - offset)",
    "std::min(tokens, i + size)",
)
_changed(
    "heads_share_the_first_one",
    "all heads of a large task read the keys of its first head",
    "unpack(task.head + head, tokens);",
    "unpack(head, tokens);",
)
_changed(
    "a_run_goes_one_page_too_far",
    "sequences that share a prefix read a page of the first of them as their own",
    "done[s] = int(stop * call.page_size);",
    "done[s] = int((stop + 1) * call.page_size);",
)
_changed(
    "a_shared_run_is_read_twice",
    "tokens of a shared run count twice",
    "task.first = std::max(task.first, done);",
    "task.first = std::max(task.first, 0 * done);",
)
_changed(
    "parts_are_added_without_weights",
    "parts of a long context are merged as if their largest scores were equal",
    "float weight = std::exp(peaks[2 * at] - peak);",
    "float weight = 1;",
)
_changed(
    "pieces_of_a_task_share_a_place",
    "the pieces of a long context overwrite each other's results",
    "plan.before[task.rows_at + i / group] + task.part)",
    "plan.before[task.rows_at + i / group])",
)
_changed(
    "a_new_peak_scales_nothing",
    "what was added before a larger score came keeps its weight",
    "std::exp(top[i] - base);",
    "1.0f;",
)
_changed(
    "sinks_are_left_out_of_the_sum",
    "a sink takes no weight",
    "total + std::exp(call.sinks[head] - top)",
    "total",
)
