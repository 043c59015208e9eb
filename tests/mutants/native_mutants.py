"""Mistakes in the native kernels: changes to their sources, which are compiled apart."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from quire.kernels import backend, hidden_states
from quire.kernels.native import draws, library, ngrams, products
from quire.kernels.native.library import Native, build, sources
from quire.models import native_decoder
from quire.speculative.ngram import NgramDrafter
from tests.kernels.native.emulated_pairs import with_pairs
from tests.kernels.native.emulated_tiles import with_tiles
from tests.mutants.mutants import Patch, mutant


def _changed(
    name: str, wrong: str, right_text: str, wrong_text: str, *, source: str = "attention.cpp", killer: str = "native"
) -> Callable[[Patch], None]:
    """`right_text` occurs once in the source, which is compiled without the other ones."""

    def apply(patch: Patch) -> None:
        texts = with_tiles(with_pairs(sources())) if killer in ("native bfloat16", "native tiles") else sources()
        assert texts[source].count(right_text) == 1, f"the source of {name} has changed"
        texts[source] = texts[source].replace(right_text, wrong_text)
        unit = (
            source
            if source.endswith(".cpp")
            else "products.cpp"
            if killer in ("native tiles", "native products")
            else "attention.cpp"
        )
        if unit != "decoder.cpp":  # which calls the others
            texts = {each: text for each, text in texts.items() if each == unit or each.endswith(".h")}
        patch.setattr(library, "_FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in library._FLAGS))
        with tempfile.TemporaryDirectory() as folder:
            path = build(texts, Path(folder))
            loaded = ctypes.CDLL(str(path))
        users = {
            "attention.cpp": backend,
            "products.cpp": products,
            "decoder.cpp": native_decoder,
            "ngrams.cpp": ngrams,
            "draws.cpp": draws,
        }
        user = users.get(unit, hidden_states)
        patch.setattr(user, "native", lambda: Native(loaded, path))

    apply.__name__ = name
    return mutant(killer, wrong)(apply)


_products = partial(_changed, source="products.cpp", killer="native products")
_products(
    "panels_share_the_first_bias",
    "outputs beyond the first panel of a product have biases of others",
    "decode(of.bias + begin * size,",
    "decode(of.bias,",
)
_products(
    "the_last_panel_is_left_out",
    "outputs beyond the last whole panel of a product are what the memory had",
    "begin < of.outputs; begin += of.width",
    "begin < std::max(of.width, of.outputs - of.width + 1); begin += of.width",
)
_products(
    "all_passes_read_the_same_rows",
    "in products of more rows than a tile has, rows after the first get the outputs of the first ones",
    "a + i * int64_t(depth), depth, b, wide",
    "a, depth, b, wide",
    source="products.h",
)
_products(
    "both_halves_of_a_panel_have_the_weights_of_the_first",
    "in products of 7 to 18 rows, the second half of 64 outputs is a copy of the first one",
    "part++, b += N * W * P::DEPTH, c += N * W)",
    "part++, c += N * W)",
    source="products.h",
)
_products(
    "rows_beyond_a_block_are_those_of_the_first",
    "the outputs of a prompt's rows beyond the first 240 are those of the first ones",
    "rows + first * of.inputs * row_number",
    "rows",
)
_products(
    "sums_of_later_blocks_land_in_the_first",
    "the outputs of a prompt's first 240 rows are those of later ones, whose own are what the memory had",
    "in_place ? (float*)to + begin",
    "in_place ? (float*)out + begin",
)
_tiles = partial(_changed, source="tiles.h", killer="native tiles")
_tiles(
    "rows_beyond_the_last_tile_are_left_out",
    "where the CPU multiplies tiles, outputs of the last rows of a step are what the memory had",
    "done < end;",
    "done + shape <= end;",
)
_tiles(
    "groups_of_a_product_are_swapped",
    "where the CPU multiplies tiles, outputs 32 apart are in each other's place for more than 31 rows",
    "of, sums), many_rows(left, row, second, of, sums + GROUP);",
    "of, sums + GROUP), many_rows(left, row, second, of, sums);",
)
_tiles(
    "a_tile_has_rows_of_the_one_before",
    "where the CPU multiplies tiles, rows 16 to 31 of a step get the outputs of the first 16",
    "rows + ROWS * row, row",
    "rows, row",
)
_tiles(
    "a_product_with_an_odd_last_group_repeats_the_first",
    "where the CPU multiplies tiles, the last outputs of a product have the weights of the first ones",
    "group + 1 < groups ? group + 1 : group",
    "group + 1 < groups - 1 ? group + 1 : 0",
)
_layers = partial(_changed, source="decoder.cpp", killer="native layers")
_layers(
    "values_are_stored_as_keys",
    "where layers are computed in one call, keys are stored in the place of values",
    "call.value.at(place, head), value +",
    "call.value.at(place, head), key +",
)
_layers(
    "all_layers_have_the_frames_of_the_first_group",
    "where layers are computed in one call, layers with a window read and write the frames of others",
    "pass.groups[layer.group]",
    "pass.groups[0 * layer.group]",
)
_layers(
    "the_last_layer_adds_nothing",
    "where layers are computed in one call, the rows lack what the last feed-forward network adds",
    "pass.hidden, pending, last.second_norm",
    "pass.hidden, nullptr, last.second_norm",
)
_layers(
    "the_attention_of_a_head_reads_what_the_memory_had",
    "where the layer of a head is computed in one call, its queries, keys and values are of other numbers",
    "read ? read : normed",
    "normed",
)
_layers(
    "rows_after_a_layer_are_those_after_the_next",
    "where layers are computed in one call, a head reads hidden states of another layer",
    "if (i) keep(pass, i - 1);",
    "if (i > 1) keep(pass, i - 2);",
)
_layers(
    "drafts_of_a_tree_see_their_siblings",
    "where layers are computed in one call, a draft sees drafts of other branches",
    "call.parents = group.parents;",
    "call.parents = nullptr;",
)
_rows = partial(_changed, source="hidden_states.cpp", killer="row functions")
_ngrams = partial(_changed, source="ngrams.cpp", killer="native n-grams")
_ngrams(
    "requests_find_n_grams_of_each_other",
    "n-grams of all requests have the same hashes, and replace each other",
    "(uint64_t(row) + 1) * OTHER_PRIME",
    "(uint64_t(row) * 0 + 1) * OTHER_PRIME",
)
_ngrams(
    "n_grams_with_one_hash_count_as_equal",
    "what came after other tokens is proposed, where two n-grams have one place in the table",
    "if (left[-back] != right[-back]) return false;",
    "",
)
_ngrams(
    "n_grams_of_a_tenant_are_found_by_hash_alone",
    "what another tenant was answered is proposed, where hashes collide",
    "of.history_spaces[place] == space && ",
    "",
)
_ngrams(
    "n_grams_go_across_the_begin_of_a_text",
    "an n-gram is found whose first tokens are the end of another request",
    "of.texts[place - size + 1] == of.texts[place] && ",
    "",
)
_ngrams(
    "drafts_go_on_in_the_next_text",
    "what another request began with is proposed behind the end of one",
    " || of.texts[place] != of.texts[match.place]",
    "",
)
_ngrams(
    "a_repetition_goes_on_behind_the_known_tokens",
    "what ends with the last token is followed by what an earlier request left in the row",
    "at % (known - 1 - match.place)",
    "at",
)
_ngrams(
    "a_copy_goes_on_anywhere",
    "a copy that became wrong is taken up again far from its place",
    "std::min(source + of.near, known - 1)",
    "known - 1",
)
_ngrams(
    "a_copy_never_departs",
    "a copy that became wrong goes on as if it had not",
    "of.departed[row] = !best.size;",
    "of.departed[row] = 0;",
)
_ngrams(
    "n_grams_give_more_than_there_is_room_for",
    "a request gets more drafts than it has room for",
    "follow(of, text, known, best, step.most[i],",
    "follow(of, text, known, best, step.depth,",
)
_ngrams(
    "equal_tokens_of_a_tree_are_one",
    "in a tree, a token is left out that follows another branch already",
    "parents[node] == parent && ",
    "",
)


@mutant("native n-grams", "after a flush of all, the library finds what was flushed")
def the_library_has_the_history_before_a_flush(patch: Patch) -> None:
    real = NgramDrafter._new_search
    patch.setattr(NgramDrafter, "_new_search", lambda self: getattr(self, "_search", None) or real(self))


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
    "frames_lie_side_by_side",
    "frames in records of host memory are read as if nothing were between them",
    "rows + place.frame * frame",
    "rows + place.frame * (frame / token) * token",
    source="call.h",
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
    "exp_of(before - load(bases))",
    "splat(1.0f)",
)
_changed(
    "sinks_are_left_out_of_the_sum",
    "a sink takes no weight",
    "total + std::exp(call.sinks[head] - top)",
    "total",
)
_changed(
    "a_peak_is_that_of_another_row",
    "the largest score of a row is taken from half of its tokens",
    "folded<Join, L, DISTANCE / 2>(Join::join(v, turned<DISTANCE>(",
    "folded<Join, L, DISTANCE / 2>(Join::join(v, turned<0 * DISTANCE>(",
    source="vectors.h",
)
_changed(
    "a_block_ends_with_tokens_that_are_none",
    "what fills the last vector of scores takes weight from the tokens",
    "std::fill(score[i] + tokens, score[i] + up, NOTHING);",
    "std::fill(score[i] + tokens, score[i] + up, 0.0f);",
)
_pairs = partial(_changed, source="in_place.h", killer="native bfloat16")
_pairs(
    "weights_of_a_pair_are_swapped",
    "in bfloat16, a value is weighed with the weight of its neighbour",
    "first = load_as<vu>(values[0] + at + j * W), second = load_as<vu>(values[1] + at + j * W)",
    "first = load_as<vu>(values[1] + at + j * W), second = load_as<vu>(values[0] + at + j * W)",
)
_pairs(
    "sizes_that_are_no_pairs_are_paired",
    "in bfloat16, values of heads of 48 numbers are read as if they had 64",
    "format == BF16 && width % Paired::NUMBERS == 0",
    "format == BF16",
    source="attention.cpp",
)
_pairs(
    "a_tile_of_keys_is_read_again",
    "where the CPU multiplies tiles, a score of a prompt counts the first 32 numbers of a key for all of them",
    "right += ROWS * ldb",
    "right += 0 * ROWS * ldb",
    source="tiles.h",
)
_pairs(
    "queries_of_two_tiles_are_the_same",
    "where the CPU multiplies tiles, 16 rows of a prompt get the answers of the 16 before them",
    "left + ROWS * lda, lda",
    "left, lda",
    source="tiles.h",
)
_pairs(
    "tiles_keep_the_weight_of_smaller_peaks",
    "where the CPU multiplies tiles, what a prompt's row added before a larger score came keeps its weight",
    "+ d) * factors[i]);",
    "+ d) * 1);",
    source="attention.cpp",
)
_pairs(
    "the_last_tokens_fill_no_tile",
    "where the CPU multiplies tiles, a prompt's row does not see the last tokens of a block",
    "round_up(depth, tiles::DEPTH), width",
    "int(depth / tiles::DEPTH * tiles::DEPTH), width",
    source="attention.cpp",
)
_pairs(
    "weights_of_two_halves_are_swapped",
    "in bfloat16, 16 tokens have the weights of the 16 after them",
    "narrowed(rough(i, t), rough(i, t + W))",
    "narrowed(rough(i, t + W), rough(i, t))",
    source="attention.cpp",
)


# -- functions on rows of hidden states


norms_have_no_epsilon = _rows(
    "norms_have_no_epsilon",
    "the norm of small hidden states is that of larger ones",
    "squares / float(width) + eps",
    "squares / float(width)",
)
_rows(
    "norms_have_no_weight",
    "hidden states are normalised and not weighed",
    "widen(weight[i]) * rounded<T>(",
    "rounded<T>(",
)
_rows(
    "norms_round_once",
    "in bfloat16, a norm is rounded once where transformers rounds twice",
    "rounded<T>(widen(from[i]) * scale)",
    "(widen(from[i]) * scale)",
)
_rows(
    "what_is_added_is_not_normalised",
    "the norm is that of the rows before the residual was added",
    "            from = sum;\n",
    "",
)
_rows(
    "keys_have_the_norm_of_queries",
    "heads of keys are weighed as heads of queries",
    "head < first ? first_norm : second_norm",
    "first_norm",
)
_rows(
    "halves_turn_the_same_way",
    "both halves of a head turn in the same direction, and distances between tokens are lost",
    "rounded<T>(-high * widen(sin[i]))",
    "rounded<T>(high * widen(sin[i]))",
)
_rows(
    "the_second_half_has_the_first_angles",
    "angles of the second half of a head are those of the first",
    "rounded<T>(high * widen(cos[i + half]))",
    "rounded<T>(high * widen(cos[i]))",
)
_rows(
    "rows_of_a_wider_product_are_packed",
    "heads are read where they would be if rows had no others",
    "rows + row * stride + head * width",
    "rows + row * heads * width + head * width",
)
_rows(
    "the_gate_is_reversed",
    "SiLU opens where it should close",
    "1.0f + exponential(-x)",
    "1.0f + exponential(x)",
)
_rows(
    "gate_and_up_are_swapped",
    "SiLU is applied to the half that it should gate",
    "*gate = pairs + row * 2 * width, *up = gate + width",
    "*up = pairs + row * 2 * width, *gate = up + width",
)
_rows(
    "the_gate_is_not_rounded",
    "in bfloat16, SiLU is not rounded before its product",
    "rounded<T>(x / (1.0f + exponential(-x)))",
    "(x / (1.0f + exponential(-x)))",
)
_rows(
    "exponentials_end_early",
    "SiLU of large negative numbers is not near zero",
    "x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x",
    "x < -8.0f ? -8.0f : x > 8.0f ? 8.0f : x",
)
_changed(
    "a_block_that_is_seen_in_part_is_passed_over",
    "queries miss the tokens of the last block that they see, where they do not see all of it",
    "low >= first + tokens || high < first;",
    "low >= first + tokens || high < first + tokens - 1;",
)
_draws = partial(_changed, source="draws.cpp", killer="native draws")
_draws(
    "requests_share_noise",
    "every request of a step draws with the random numbers of the first one",
    "of.keys + next++",
    "of.keys + 0 * next++",
)
_draws(
    "the_last_token_of_a_nucleus_is_left_out",
    "the least likely token that top-k, top-p or min-p keeps is never drawn",
    "(x >= least)",
    "(x > least)",
)
_draws(
    "top_p_ignores_top_k",
    "top-p is a share of all tokens, also where top-k has left some out",
    "total += mass(likely.data(), int64_t(likely.size()))",
    "total = 1e9",
)
_draws(
    "unlikely_tokens_are_passed_over",
    "tokens that few random numbers can draw are drawn too seldom",
    "x - highest) * slack",
    "x - highest) * 0.5f",
)
_draws(
    "the_end_of_a_vocabulary_is_not_read",
    "the last tokens of a vocabulary that is no multiple of a vector are never drawn",
    "j < of.width; j++) found[j - i]",
    "j < i; j++) found[j - i]",
)
