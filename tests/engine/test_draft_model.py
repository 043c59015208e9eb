"""A draft model on the pages of its target: the same tokens, all drafts right where both are one model, and no page
without what the draft has computed."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.running import core_for, run, shared_prompts
from tests.tiny_models import VOCAB_SIZE, build_tiny

STEPS = 4
DRAFT = {"method": "draft_model", "model": "draft", "num_speculative_tokens": STEPS}
BOUNDS = {"max_model_len": 256, "max_running_requests": 8}
NEW_TOKENS = 40
PROMPTS = shared_prompts(7, shared=37, tails=(3, 20, 11, 1, 29), vocabulary=VOCAB_SIZE)
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_tokens=NEW_TOKENS, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.3, seed=2, repetition_penalty=1.1, frequency_penalty=0.2, max_tokens=NEW_TOKENS, min_tokens=20
    ),
}
PAGES = (1, 4, 16, 64)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return LoadedModel(build_tiny("llama_gqa"), name="llama_gqa")


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    """Another shape, another number of heads, other weights."""
    return LoadedModel(build_tiny("qwen3", num_hidden_layers=1), name="small")


def ungoverned(core: EngineCore) -> dict[str, Any]:
    """From now on, every request drafts as far as there is room. The statistics so far."""
    assert core.speculator is not None
    core.speculator._governor = None
    return core.speculator.statistics()


def check_right(core: EngineCore) -> None:
    """All drafts were right, and as many were made as a request may have."""
    assert core.speculator is not None
    found = core.speculator.statistics()
    assert found["draft_tokens"] > found["drafts"] > 0
    assert found["accepted_tokens"] == found["draft_tokens"]
    assert all(frames["private"] == 0 for frames in core.statistics()["frames"].values())


@pytest.mark.parametrize("params", sorted(PARAMS))
@pytest.mark.parametrize("page_size", PAGES)
def test_a_model_drafts_for_itself(target: LoadedModel, page_size: int, params: str) -> None:
    """Acceptance of all: the draft has computed every token before, cold, warm, and behind prompts in chunks."""
    expected = run(core_for(target, page_size=page_size, **BOUNDS), PROMPTS, PARAMS[params])
    core = core_for(
        target, page_size=page_size, draft=target, speculative_config=DRAFT, max_num_batched_tokens=23, **BOUNDS
    )
    ungoverned(core)
    for turn in ("cold", "warm"):
        assert run(core, PROMPTS, PARAMS[params], turn) == expected
    check_right(core)
