"""Pages selected by bounds of their keys: the tokens of full attention where all pages are read, and elsewhere those of
a reference that selects the same pages in one pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from quire.engine.core import EngineCore
from quire.models.hf import LoadedModel, load_model
from quire.plan.budget import MemoryPlan
from quire.plan.plan import Plan
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.hisparse import HotBuffers
from tests.engine.page_reference import page_logits
from tests.engine.running import core_for, run
from tests.tiny_models import VOCAB_SIZE, save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
CONTEXTS = (3, 30, 47, 64, 90, 130)


def selecting_core(model: LoadedModel, top_k: int, buffer_size: int, **settings: Any) -> EngineCore:
    planned = Plan.memory.fget
    assert planned is not None

    def memory(plan: Plan) -> MemoryPlan:
        found: MemoryPlan = planned(plan)
        group = next(at for at, g in enumerate(found.groups) if g.name == "full")
        return replace(found, hot=HotBuffers(group=group, buffer_size=buffer_size, top_k=top_k))

    before, model.spec = model.spec, model.spec.with_page_bounds()
    with patch.object(Plan, "memory", property(memory)):
        try:
            return core_for(model, **{"max_running_requests": 8, **settings})
        finally:
            model.spec = before


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB_SIZE - 1, length).tolist() for length in lengths]


def count_likely(model: LoadedModel, prompt: list[int], found: list[int], **how: int) -> int:
    """How many of the tokens are the most likely ones, of the reference on the tokens before them."""
    logits = page_logits(model, [*prompt, *found], **how)[len(prompt) - 1 : -1]
    drawn = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
    return int((drawn >= logits.max(1).values - 1e-3).sum())


@pytest.fixture(scope="module", params=["llama_gqa", "gemma3_text", "gpt_oss", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """GQA; windows beside full attention; sinks; capped scores."""
    return load_model(save_tiny(request.param, tmp_path_factory.mktemp(request.param)))


def check_selection(model: LoadedModel, page_size: int, share: float = 1) -> None:
    """All prompts in one step; then, cached or not, each alone in chunks of 50 tokens."""
    top_k, prompts = max(32, page_size), prompts_of(*CONTEXTS)
    for name, budget in (("batch", 512), ("chunks", 50)):
        core = selecting_core(model, top_k, top_k + 5, page_size=page_size, max_num_batched_tokens=budget)
        for warm in (False, True):
            if budget == 512:
                found = run(core, prompts, GREEDY, f"{name} {warm}")
            else:
                found = [run(core, [prompt], GREEDY, f"{name} {warm} {len(prompt)}")[0] for prompt in prompts]
            likely = 0
            for prompt, tokens in zip(prompts, found, strict=True):
                cached = (len(prompt) - 1) // page_size * page_size if warm else 0
                decoded = len(prompt) - (len(prompt) - cached == 1)
                likely += count_likely(model, prompt, tokens, decoded=decoded, page_size=page_size, top_k=top_k)
            assert likely >= share * sum(map(len, found))
        counts = core.statistics()
        assert counts["hit_tokens"] > 0
        assert min(counts["hisparse"][name] for name in ("hit_tokens", "swapped_tokens")) > 0
        core.close()


def test_tokens_are_those_of_the_same_selection(model: LoadedModel) -> None:
    check_selection(model, 16)


@pytest.mark.parametrize(
    ("page_size", "dtype", "share"), [(1, "float32", 1), (64, "float32", 1), (16, "bfloat16", 0.9)]
)
def test_other_pages_and_numbers(page_size: int, dtype: str, share: float, tmp_path: Path) -> None:
    """In bfloat16 limits and logits are often nearly equal."""
    check_selection(load_model(save_tiny("llama_gqa", tmp_path), dtype=dtype), page_size, share)


def test_a_top_k_of_the_context_gives_the_tokens_of_full_attention(model: LoadedModel) -> None:
    prompts = prompts_of(*CONTEXTS)
    core = selecting_core(model, 160, 160, max_num_batched_tokens=50)
    assert run(core, prompts, GREEDY) == run(core_for(model, max_num_batched_tokens=50), prompts, GREEDY)
    core.close()
