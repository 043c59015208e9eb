"""Greedy tokens equal `transformers` generation: every architecture, page size and chunk, cold, warm and starved."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from quire.models.hf import LoadedModel, load_model
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.pages import pages_for
from tests.changes import MODELS, in_turns
from tests.covering import covering, few
from tests.engine.running import core_for, generated, run, shared_prompts
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, build_tiny, save_tiny

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
PROMPTS = shared_prompts(7, shared=37, tails=(3, 20, 11, 1, 29), vocabulary=VOCAB_SIZE)
LONGEST = max(map(len, PROMPTS)) + NEW_TOKENS

NAMES = sorted(ARCHITECTURES)
SPREAD = [*NAMES[::3], *NAMES[1::3], *NAMES[2::3]]


@cache
def case_of(name: str) -> tuple[LoadedModel, list[list[int]]]:
    """A loaded model and what transformers generates with the same weights."""
    folder = save_tiny(name, Path(mkdtemp()))
    reference = build_tiny(name)
    return load_model(str(folder)), [generated(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.fixture(params=in_turns(few(SPREAD, 13), 2, *MODELS))
def case(request: pytest.FixtureRequest) -> tuple[LoadedModel, list[list[int]]]:
    return case_of(request.param)


@covering(name=in_turns(NAMES, 3, *MODELS), point=[(1, 23, False), (16, 50, True), (64, 2048, False)])
def test_cold_then_warm(name: str, point: tuple[int, int, bool]) -> None:
    """Mixed batches on an ample pool; the second time the prompts are found in the cache."""
    (model, expected), (page_size, chunk, overlap) = case_of(name), point
    core = core_for(model, page_size=page_size, max_num_batched_tokens=chunk, overlap=overlap)
    assert run(core, PROMPTS, GREEDY, "cold") == expected
    cold = core.statistics()
    assert run(core, PROMPTS, GREEDY, "warm") == expected
    warm = core.statistics()
    hits = warm["hit_tokens"] - cold["hit_tokens"]
    reusable = sum((len(prompt) - 1) // page_size * page_size for prompt in PROMPTS)
    assert hits == reusable > 0
    assert all(frames["private"] == 0 for frames in warm["frames"].values())


def test_starved(case: tuple[LoadedModel, list[list[int]]]) -> None:
    """A pool that holds little more than one request: everything is evicted or preempted, and nothing is different."""
    model, expected = case
    page_size = 4
    core = core_for(
        model,
        pages=pages_for(LONGEST - 1, page_size) + 8,
        page_size=page_size,
        max_num_batched_tokens=17,
        eviction="lru",
    )
    for turn in range(2):
        assert run(core, PROMPTS, GREEDY, f"turn{turn}") == expected
    statistics = core.statistics()
    dropped = sum(frames["dropped"] for frames in statistics["frames"].values())
    assert statistics["evicted_pages"] + dropped > 0  # a model of windows only is short of frames, not of pages
    assert statistics["preemptions"] + dropped > 0  # a window pool admits fewer at once, and is short instead
    assert statistics["hit_tokens"] > 0
    assert all(frames["private"] == 0 for frames in statistics["frames"].values())


def test_tokens_vary(case: tuple[LoadedModel, list[list[int]]]) -> None:
    """The weights are drawn wide enough that the comparison can fail: prompts that differ give tokens that differ."""
    _, expected = case
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert len({token for tokens in expected for token in tokens}) > 4
