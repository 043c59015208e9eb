"""Greedy tokens of hybrids equal `transformers` generation: cold, warm, and with windows and states evicted between."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from quire.models.hf import LoadedModel
from quire.models.registry import REFUSED
from quire.plan.plan import in_arena
from quire.scheduler.chunk_budget import LEAST_TOKENS
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.model import ModelSpec
from quire.spec.pages import pages_for
from tests.changes import CORE, MODELS, in_turns, slow_unless_changed
from tests.covering import covering, few
from tests.engine.running import core_for, generated, run, shared_prompts, tight_core
from tests.tiny_hybrids import HYBRIDS, build_hybrid, published
from tests.tiny_latents import SPARSE, build_latent
from tests.tiny_models import VOCAB_SIZE

NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
PROMPTS = shared_prompts(7, shared=37, tails=(3, 20, 11, 1, 29), vocabulary=VOCAB_SIZE)
LONGEST = max(map(len, PROMPTS)) + NEW_TOKENS
SERVED = sorted(
    {n for n, config in HYBRIDS.items() if config["model_type"] not in REFUSED and "index_topk" not in config}
    | set(SPARSE)
)
"""Without DeepSeek-V4, whose pages are larger than these prompts: see tests/models/test_compressed.py."""
PAGES_OF_ARENAS = (4, 1, 16, 64)
GRID = ((1, 23, False), (16, 32, False), (16, 50, True), (64, 2048, False))

Case = tuple[LoadedModel, list[list[int]]]


def build(name: str, **overrides: Any) -> Any:
    """The tiny model of that name, with random weights that are always the same."""
    return build_latent(name, **overrides) if name in SPARSE else build_hybrid(name, **overrides)


@cache
def case_of(name: str, **overrides: Any) -> Case:
    """A loaded model and what transformers generates with the same weights."""
    reference = build(name, **overrides)
    expected = [generated(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]
    return LoadedModel(build(name, **overrides), name=name), expected


@pytest.fixture(scope="module", params=in_turns(SERVED, 4, *MODELS))
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


def check_cold_then_warm(case: Case, page_size: int, chunk: int, overlap: bool) -> None:
    """Ample pools; the second time, prompts are found cached to their last whole page, whatever kinds of layers."""
    model, expected = case
    # Where tokens cost nothing a pool has millions of them, and audits look at every one.
    bounds = {"max_model_len": 256, "max_running_requests": 8}
    core = core_for(model, page_size=page_size, max_num_batched_tokens=chunk, overlap=overlap, **bounds)
    assert run(core, PROMPTS, GREEDY, "cold") == expected
    cold = core.statistics()["hit_tokens"]
    assert run(core, PROMPTS, GREEDY, "warm") == expected
    reusable = sum((len(prompt) - 1) // page_size * page_size for prompt in PROMPTS)
    assert core.statistics()["hit_tokens"] - cold == reusable > 0
    assert all(frames["private"] == 0 for frames in core.statistics()["frames"].values())


def test_cold_then_warm(case: Case) -> None:
    """One point of the grid for each model; all points for all models are among the long tests."""
    check_cold_then_warm(case, *GRID[SERVED.index(case[0].name) % len(GRID)])


@pytest.mark.parametrize(
    "case", in_turns(few([*SERVED[::3], *SERVED[1::3], *SERVED[2::3]], 13), 3, *MODELS), indirect=True
)
def test_the_least_chunks_beside_decodes(case: Case) -> None:
    """A target that no step meets: beside requests that decode, a prompt goes on by the least chunk."""
    model, expected = case
    bounds = {"max_model_len": 256, "max_running_requests": 8, "max_num_batched_tokens": 48, "target_itl_ms": 0.001}
    core = core_for(model, page_size=4, overlap=SERVED.index(model.name) % 2 == 0, **bounds)
    assert run(core, PROMPTS, GREEDY) == expected
    found = core.statistics()["chunk_budget"]
    assert found["steps"] > 1 and 0 < found["tokens"] <= LEAST_TOKENS * 2 * found["steps"]


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "chunk", "overlap"), GRID)
def test_cold_then_warm_everywhere(case: Case, page_size: int, chunk: int, overlap: bool) -> None:
    check_cold_then_warm(case, page_size, chunk, overlap)


KINDS = (
    "deepseek_v3",
    "deepseek_v32",
    "falcon_h1",
    "gemma3_text",
    "gpt_oss",
    "llama4_text",
    "mamba2",
    "mistral_all_slide",
    "qwen3_next",
)
"""A model of every combination of groups."""
OTHERS = sorted(set(SERVED) - set(KINDS))


@pytest.mark.parametrize(
    "name",
    [*in_turns(KINDS, 2, *MODELS, *CORE), *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
def test_starved(name: str) -> None:
    """Pools for little more than one request, one window and four states: all is dropped, evicted, skipped or preempted
    again and again, and nothing is different."""
    check_starved(*case_of(name), page_size=4, window_tokens=28)


SHARING = [
    name
    for name in SERVED
    if name not in SPARSE and in_arena(ModelSpec.from_config(published(name)).groups(PAGES_OF_ARENAS[0]))
]
"""Models of two groups that may have an arena."""


@pytest.mark.parametrize("name", in_turns(("gemma3_text", "llama4_text", "qwen3_next", "falcon_h1"), 2, *MODELS, *CORE))
def test_starved_in_an_arena(name: str) -> None:
    assert check_starved_in_an_arena(name, PAGES_OF_ARENAS[0]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGES_OF_ARENAS)
@pytest.mark.parametrize("name", SHARING)
def test_starved_in_an_arena_everywhere(name: str, page_size: int) -> None:
    check_starved_in_an_arena(name, page_size)


def check_starved_in_an_arena(name: str, page_size: int) -> int:
    """The bytes of little more than one request, which both groups share. Returns how many frames moved."""
    model, expected = case_of(name)
    window = max(group.reach.tokens for group in model.spec.groups(page_size))
    core = tight_core(
        model,
        num_tokens=(pages_for(LONGEST - 1, page_size) + 8) * page_size,
        window_tokens=window + 4 * page_size,
        page_size=page_size,
        max_num_batched_tokens=17,
        max_running_requests=3,
        arena=True,
        canary="all",
    )
    assert core.plan.arena is not None
    for turn in range(2):
        assert run(core, PROMPTS, GREEDY, f"turn{turn}") == expected
    core.audit()
    found = core.statistics()
    assert found["hit_tokens"] > 0 and not found["canary"]["found_pages"]
    assert all(owners["private"] == 0 for owners in found["frames"].values())
    return core.cache.statistics().moved_frames


def check_starved(model: LoadedModel, expected: list[list[int]], *, page_size: int, window_tokens: int) -> None:
    groups = model.spec.groups(page_size)
    kinds = [group.reach.kind for group in groups]
    core = tight_core(
        model,
        num_tokens=(pages_for(LONGEST - 1, page_size) + 8) * page_size,
        window_tokens=window_tokens,
        page_size=page_size,
        max_num_batched_tokens=17,
        max_running_requests=3,
        max_mamba_cache_size=4 if "state" in kinds else None,
    )
    for turn in range(2):
        assert run(core, PROMPTS, GREEDY, f"turn{turn}") == expected
    found = core.statistics()
    frames = dict(zip(kinds, found["frames"].values(), strict=True))
    assert found["hit_tokens"] > 0
    if "full" in kinds and page_size == 4:  # with larger pages, less is cached than fits
        assert found["evicted_pages"] > 0
    for kind in kinds[kinds.count("full") :]:
        owners = frames[kind]
        assert owners["dropped"] + found["evicted_pages"] > 0, f"the {kind} group was never short, so this shows little"
    assert all(owners["private"] == 0 for owners in found["frames"].values())


@slow_unless_changed(*MODELS, "src/quire/memory/", "src/quire/cache/")
@covering(window=[15, 16, 17, 64], kind=[("gpt_oss", "sliding_window"), ("llama4_text", "attention_chunk_size")])
def test_windows_around_a_page(kind: tuple[str, str], window: int) -> None:
    """Windows and chunks of a page less one, a page, a page and one, and four pages, in a pool of little more."""
    name, field = kind
    page_size = 16
    model, expected = case_of(name, **{field: window})
    (full, part) = model.spec.groups(page_size)
    assert (full.reach.kind, part.reach.tokens) == ("full", window)
    check_cold_then_warm((model, expected), page_size, 50, True)
    check_starved(model, expected, page_size=page_size, window_tokens=(pages_for(window, page_size) + 5) * page_size)


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1"])
def test_one_window_or_state_for_all(name: str) -> None:
    """The least that a plan allows: one state, or a window and two pages."""
    model, expected = case_of(name)
    states = any(group.reach.kind == "state" for group in model.spec.groups(16))
    core = tight_core(
        model,
        num_tokens=1024,
        window_tokens=48,
        page_size=16,
        max_num_batched_tokens=64,
        max_running_requests=4,
        max_mamba_cache_size=1 if states else None,
    )
    for turn in range(2):
        assert run(core, PROMPTS, GREEDY, f"turn{turn}") == expected
    frames = core.statistics()["frames"]
    if states:
        assert frames["state"]["total"] == 1
        assert frames["state"]["skipped"] > 0


def test_a_model_of_windows_only_serves_more_than_its_pool() -> None:
    """Pages that a request has passed take no frame, so that a prompt of many windows goes through a pool of a few."""
    model = LoadedModel(build("mistral_all_slide"), name="mistral")
    (window,) = model.spec.groups(4)
    core = tight_core(model, num_tokens=48, page_size=4, max_num_batched_tokens=16)
    assert core.plan.frames_of(0) == 12
    assert window.reach.tokens == 7
    (prompt,) = shared_prompts(5, shared=0, tails=(200,), vocabulary=VOCAB_SIZE)
    for turn in range(2):
        assert run(core, [prompt], GREEDY, f"t{turn}") == [generated(build("mistral_all_slide"), prompt, NEW_TOKENS)]
    assert core.statistics()["hit_tokens"] == 196


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next", "lfm3", "llama4_text"])
def test_hits_do_not_depend_on_where_a_shared_prefix_ends(name: str) -> None:
    """Prompts that share 160 tokens and up to eight pages more: the third one computes its own tokens only."""
    model = LoadedModel(build_hybrid(name), name=name)
    one = SamplingParams(temperature=0, max_tokens=1)
    core = core_for(model, page_size=16)
    for shift in range(0, 129, 32):
        prompts = shared_prompts(shift, shared=160 + shift, tails=(20, 20, 20), vocabulary=VOCAB_SIZE)
        before = []
        for index, prompt in enumerate(prompts):
            before.append(core.statistics()["hit_tokens"])
            run(core, [prompt], one, f"{shift}-{index}")
        assert core.statistics()["hit_tokens"] - before[2] == 160 + shift


@slow_unless_changed(*MODELS, "src/quire/memory/", "src/quire/cache/")
@pytest.mark.parametrize("name", ["gemma2", "falcon_h1", "glm_moe_dsa"])
def test_measured_differences_still_hold(name: str) -> None:
    """What the table in docs/guides/hybrids.md says was measured is measured now, up to a machine's rounding."""
    from tests.engine.logit_differences import MODELS, RESULTS, largest_difference

    recorded = json.loads(RESULTS.read_text())["models"]
    assert set(recorded) == set(MODELS)
    assert max(entry["difference"] for entry in recorded.values()) < 1e-3
    difference, deviation = largest_difference(name)
    assert 0 < difference < max(1e-4, 5 * recorded[name]["difference"])
    assert deviation > 0.5, "logits this close together show little"
