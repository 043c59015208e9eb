"""What a decoding request holds beyond its own tokens: recorded figures of another engine, worked numbers, properties.

The formulas ask one thing of the method of drafting: whether it writes keys and values. Where the recorded engine
leaves a number out, so do we, or we have it refused: see `MISSING`.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache import KVCache
from quire.errors import InvalidInput
from quire.plan.mix import uniform
from quire.plan.planner import create_memory_pool_configurator
from quire.plan.settings import PlanSettings
from quire.spec.group import ReachSpec
from quire.spec.layers import AttentionCall
from quire.spec.layout import DType
from quire.spec.model import ModelSpec
from quire.spec.pages import pages_for
from quire.spec.speculation import (
    SpeculativeConfig,
    get_alloc_len_per_decode,
    get_alloc_reserve_per_decode,
    get_req_to_token_extra_context_len,
)
from quire.testing import small_plan
from tests.plan.check import pool_settings

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "alloc_len_0.5.23.json.gz"

ONE_TOKEN_MORE = "UNO"
"""An algorithm that reserves the verified tokens and one more, whatever its steps and branches. We have no such
drafting; should it come, it is a SpeculativeConfig with one more token to verify and no layers."""

MISSING = {
    "speculative_num_draft_tokens": "refused: an error there, and a missing argument here",
    "speculative_num_steps": "the recorded figures are those of one step; Speculation cannot be made without it here",
    "speculative_eagle_topk": "one branch, here as there",
}
"""What each number is when the recorded question leaves it out."""

COUNTS = {"none": 5, "equal": 1308, "one token more": 218, "refused": 364}

WORKED = [
    # page size, steps, branches, verified tokens: one step's tokens, the reserve, the headroom of a row
    (16, 5, 4, 8, 128, 256, 271),
    (1, 5, 4, 8, 20, 40, 12),
    (16, 5, 1, 6, 6, 12, 27),
    (64, 1, 1, 2, 2, 4, 67),
    (16, 1, 4, 2, 64, 128, 143),
    (16, 2, 4, 2, 128, 256, 271),
]

pages = st.integers(1, 512)
speculations = st.builds(
    SpeculativeConfig,
    method=st.sampled_from(["eagle", "ngram"]),
    num_steps=st.integers(1, 16),
    topk=st.integers(1, 8),
    num_draft_tokens=st.integers(1, 64),
    num_layers=st.integers(0, 3),
)
any_speculation = st.none() | speculations


# -- recorded figures


def recorded() -> list[dict[str, Any]]:
    if not GOLDEN.exists():
        pytest.skip("no recorded figures: shared/golden is not beside the repo")
    with gzip.open(GOLDEN, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["alloc_len"]
    return found


def speculation_of(question: dict[str, Any]) -> SpeculativeConfig | None:
    """The same drafting here. Raises TypeError where the number of verified tokens is missing."""
    if question["speculative_algorithm"] is None:
        return None
    given = {"num_draft_tokens": question["speculative_num_draft_tokens"], "topk": question["speculative_eagle_topk"]}
    return SpeculativeConfig(
        method="ngram" if question["speculative_algorithm"] == "NGRAM" else "eagle",
        num_steps=question["speculative_num_steps"] or 1,
        **{name: number for name, number in given.items() if number is not None},
    )


def figures(speculation: SpeculativeConfig | None, page_size: int) -> tuple[int, int, int]:
    return (
        get_alloc_len_per_decode(speculation, page_size),
        get_alloc_reserve_per_decode(speculation, page_size),
        get_req_to_token_extra_context_len(speculation, page_size),
    )


def theirs(answer: dict[str, Any]) -> tuple[Any, Any, Any]:
    return (
        answer["alloc_len_per_decode"],
        answer["alloc_reserve_per_decode"],
        answer["req_to_token_extra_context_len"],
    )


def test_every_recorded_figure_is_ours_or_listed() -> None:
    found: Counter[str] = Counter()
    for case in recorded():
        question, answer = case["input"], case["output"]
        page_size = question["page_size"] * question["dcp_size"]
        assert page_size == answer["alloc_page_size"]
        if isinstance(answer["alloc_len_per_decode"], dict):
            assert question["speculative_num_draft_tokens"] is None
            with pytest.raises(TypeError, match="num_draft_tokens"):
                speculation_of(question)
            found["refused"] += 1
            continue
        speculation = speculation_of(question)
        if question["speculative_algorithm"] == ONE_TOKEN_MORE:
            assert speculation is not None
            most = question["speculative_num_draft_tokens"] + 1
            assert theirs(answer)[:2] == (most, 2 * most)
            alike = SpeculativeConfig(method="ngram", num_steps=1, num_draft_tokens=most)
            assert figures(alike, page_size)[:2] == theirs(answer)[:2]
            # Here alone, their headroom covers the reserve on single tokens too.
            assert theirs(answer)[2] == max(4 + most - 1, 2 * most + page_size - 1)
            found["one token more"] += 1
            continue
        assert figures(speculation, page_size) == theirs(answer), question
        found["none" if speculation is None else "equal"] += 1
    assert dict(found) == COUNTS
    assert sum(COUNTS.values()) == len(recorded())


def test_what_a_missing_number_means() -> None:
    """Each of `MISSING` as it is told: refused, or the default."""
    assert set(MISSING) <= recorded()[0]["input"].keys()
    with pytest.raises(TypeError, match="num_draft_tokens"):
        SpeculativeConfig(method="eagle", num_steps=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="num_steps"):
        SpeculativeConfig(method="eagle", num_draft_tokens=4)  # type: ignore[call-arg]
    assert SpeculativeConfig(method="eagle", num_steps=3, num_draft_tokens=4).topk == 1


# -- other recorded kinds of the same file


def recorded_kind(kind: str, count: int) -> list[dict[str, Any]]:
    if not GOLDEN.exists():
        pytest.skip("no recorded figures: shared/golden is not beside the repo")
    with gzip.open(GOLDEN, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)[kind]
    assert len(found) == count
    return found


def test_a_recorded_request_cap_is_ours_with_windows_kept_for_128_steps_more() -> None:
    """Decision 015. Theirs frees passed pages every 128 steps, ours with each step; theirs counts a chunk twice where
    steps overlap, ours once, since the second chunk is launched when the window has passed the first."""
    for case in recorded_kind("swa_request_cap", 144):
        question = case["input"]
        page, window, requests = question["page_size"], question["window"], question["max_running_requests"]
        overlap, chunk = not question["disable_overlap_schedule"], question["chunked_prefill_size"]
        speculation = speculation_of({"speculative_eagle_topk": None, **question})
        step, reserve, _ = figures(speculation, page)
        late = window + 128 * step
        if speculation is not None and overlap:
            theirs_each = late + reserve + page
        else:
            theirs_each = pages_for(late + step, page) * page + page
        assert case["output"] == page + (2 if overlap else 1) * chunk + requests * theirs_each, question

        options = pool_settings(
            mix=uniform(4096, "a ratio is given"),
            chunk=chunk,
            enable_prefix_caching=False,
            speculative_config=speculation,
            concurrency=requests,
            swa_full_tokens_ratio=Fraction(1),
        )
        ours_each = options.window_tokens(ReachSpec("window", window), page)
        assert ours_each == window + page + reserve
        assert theirs_each - ours_each >= 127 * step - reserve
        assert _window_tokens(options, window, page) == requests * pages_for(ours_each, page) * page + chunk
        assert _window_tokens(options, window, page) < case["output"]


def _window_tokens(options: PlanSettings, window: int, page_size: int) -> int:
    """Tokens of the window pool of a model of a full and a window layer in memory without end."""
    wide = AttentionCall(kv_heads=1, key_dim=1, value_dim=1)
    spec = ModelSpec(
        architecture="two layers",
        layers=((wide,), (replace(wide, window=window),)),
        context_length=2**20,
        vocab_size=8,
        dtype=DType.BFLOAT16,
    )
    solve = create_memory_pool_configurator(spec.groups, options, page_size=page_size)
    return solve.calculate_pool_sizes(2**40, page_size).swa_max_total_num_tokens or 0


def test_recorded_lengths_before_a_decode_step_are_the_pages_that_rows_grow_to() -> None:
    for case in recorded_kind("page_aligned_decode_alloc_lens", 5):
        question, answer = case["input"], case["output"]
        page, held = question["page_size"], question["allocated"]
        cache = KVCache(small_plan(2 * sum(held) // page, page, context=4096, max_requests=len(held)))
        kvs = [cache.begin(np.full(2, index, dtype=np.int32)) for index in range(len(held))]
        cache.extend(kvs, held)
        assert answer["cur"] == held
        before = cache.pages.num_free_pages
        cache.reserve(kvs, [tokens + question["reserve"] for tokens in question["committed"]])
        pages = [len(cache.rows.page_ids(kv)) for kv in kvs]
        assert pages == [pages_for(tokens, page) for tokens in answer["nxt"]]
        taken = sum(pages) - sum(pages_for(tokens, page) for tokens in held)
        assert before - cache.pages.num_free_pages == taken
        assert answer["num_needed_tokens"] == sum(answer["nxt"]) - sum(held)
        assert taken * page <= answer["num_needed_tokens"]


def test_recorded_slots_that_track_states_are_our_checkpoints() -> None:
    """Decision 015. Theirs has buffers for the states of a request, two where steps overlap. A request here has two
    states beside the one that it writes where prefixes are kept, and none where they are not."""
    found = {
        (case["input"]["extra_buffer"], case["input"]["overlap"]): case["output"]
        for case in recorded_kind("mamba_tracking_slots", 4)
    }
    assert found == {(False, False): 0, (False, True): 0, (True, False): 1, (True, True): 2}
    mix = uniform(4096, "any")
    assert pool_settings(mix=mix, enable_prefix_caching=True).states_per_request == 1 + found[True, True]
    assert pool_settings(mix=mix, enable_prefix_caching=False).states_per_request == 1 + found[False, True]


# -- worked numbers


@pytest.mark.parametrize(("page_size", "steps", "topk", "drafts", "step", "reserve", "headroom"), WORKED)
def test_worked_numbers(
    page_size: int, steps: int, topk: int, drafts: int, step: int, reserve: int, headroom: int
) -> None:
    speculation = SpeculativeConfig(method="eagle", num_steps=steps, topk=topk, num_draft_tokens=drafts)
    assert figures(speculation, page_size) == (step, reserve, headroom)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_without_speculation_a_step_is_one_token_and_the_reserve_two(page_size: int) -> None:
    assert figures(None, page_size) == (1, 2, 4)


def test_drafts_that_write_nothing_need_no_pages_of_their_own() -> None:
    tree = SpeculativeConfig(method="eagle", num_steps=5, topk=4, num_draft_tokens=8)
    assert get_alloc_len_per_decode(tree, 16) == 128
    assert get_alloc_len_per_decode(replace(tree, method="ngram"), 16) == 20


@pytest.mark.parametrize("name", ["num_steps", "topk", "num_draft_tokens"])
def test_numbers_below_one_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        SpeculativeConfig(method="eagle", **{"num_steps": 1, "num_draft_tokens": 1, name: 0})
    with pytest.raises(InvalidInput, match="-1 draft layers"):
        SpeculativeConfig(method="eagle", num_steps=1, num_draft_tokens=1, num_layers=-1)


# -- properties


@given(any_speculation, pages)
def test_the_reserve_is_two_steps(speculation: SpeculativeConfig | None, page_size: int) -> None:
    step = get_alloc_len_per_decode(speculation, page_size)
    assert get_alloc_reserve_per_decode(speculation, page_size) == 2 * step


@given(speculations, pages)
def test_a_step_has_room_for_what_it_verifies_and_for_every_branch(
    speculation: SpeculativeConfig, page_size: int
) -> None:
    step = get_alloc_len_per_decode(speculation, page_size)
    assert step >= speculation.num_draft_tokens
    assert step >= speculation.num_steps * speculation.topk
    assert step >= get_alloc_len_per_decode(None, page_size)


@given(speculations, st.integers(2, 512))
def test_a_branch_of_a_tree_covers_its_steps_from_any_offset_in_a_page(
    speculation: SpeculativeConfig, page_size: int
) -> None:
    if speculation.topk == 1 or not speculation.num_layers:
        return
    share = get_alloc_len_per_decode(speculation, page_size) // speculation.topk // page_size
    touched = {
        len({(offset + step) // page_size for step in range(speculation.num_steps)}) for offset in range(page_size)
    }
    assert max(touched) <= share


@given(speculations, pages, st.sampled_from(["num_steps", "topk", "num_draft_tokens"]), st.integers(1, 8))
def test_more_drafting_never_takes_less(speculation: SpeculativeConfig, page_size: int, name: str, more: int) -> None:
    larger = replace(speculation, **{name: getattr(speculation, name) + more})
    less, most = figures(speculation, page_size), figures(larger, page_size)
    assert all(a <= b for a, b in zip(less, most, strict=True))


@given(any_speculation, pages, st.integers(1, 16))
def test_pages_that_hold_whole_smaller_ones_never_take_less(
    speculation: SpeculativeConfig | None, page_size: int, times: int
) -> None:
    """Only along multiples: 5 steps from any offset touch 3 pages of 3 tokens, 9 in all, and 2 of 4, which are 8."""
    less, most = figures(speculation, page_size), figures(speculation, page_size * times)
    assert all(a <= b for a, b in zip(less, most, strict=True))


@given(any_speculation, pages, st.integers(1, 4096))
def test_a_row_covers_the_reserve_at_the_end_of_a_context(
    speculation: SpeculativeConfig | None, page_size: int, context: int
) -> None:
    """In whole pages. Not on single tokens with speculation, where the recorded headroom, which is ours too, is the
    drafts and a margin: 12 where the reserve is 40 in the worked numbers."""
    if speculation is not None and page_size == 1:
        return
    row = context + get_req_to_token_extra_context_len(speculation, page_size)
    held = context + get_alloc_reserve_per_decode(speculation, page_size)
    assert -(-row // page_size) >= -(-held // page_size)
    if speculation is not None:
        assert row >= -(-held // page_size) * page_size
