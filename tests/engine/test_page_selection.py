"""Pages selected by bounds of their keys: the tokens of full attention where all pages are read, and elsewhere those of
a reference that selects the same pages in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from quire.engine import planning
from quire.engine.core import EngineCore
from quire.engine.planning import plan_settings
from quire.errors import UnsupportedModel
from quire.models import attention
from quire.models.hf import LoadedModel, load_model
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.hisparse import PAGE_BOUNDS, HiSparseConfig
from tests.changes import HISPARSE, slow_unless_changed
from tests.engine.drafted import drafts_freely
from tests.engine.page_reference import page_logits
from tests.engine.running import core_for, run
from tests.tiny_hybrids import build_hybrid
from tests.tiny_models import VOCAB_SIZE, save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
CONTEXTS = (3, 30, 47, 64, 90, 130)


def selecting_core(
    model: LoadedModel, top_k: int, buffer_size: int, *, tokens: int | None = None, **settings: Any
) -> EngineCore:
    """An engine that reads pages of `top_k` tokens, with `tokens` tokens in pages and as many in buffers."""
    asked = HiSparseConfig(
        selection=PAGE_BOUNDS,
        top_k=top_k,
        device_buffer_size=buffer_size,
        host_to_device_ratio=None if tokens is None else 1,
    )
    more = {"hisparse": asked, "max_total_tokens": tokens}
    with patch.object(planning, "plan_settings", lambda config: plan_settings(config).changed(**more)):
        return core_for(model, **{"max_running_requests": 8, **settings})


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB_SIZE - 1, length).tolist() for length in lengths]


def count_likely(model: LoadedModel, prompt: list[int], found: list[int], **how: int) -> int:
    """How many of the tokens are the most likely ones, of the reference on the tokens before them."""
    logits = page_logits(model, [*prompt, *found], **how)[len(prompt) - 1 : -1]
    drawn = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
    return int((drawn >= logits.max(1).values - 1e-3).sum())


@pytest.fixture(
    scope="module",
    params=[
        "gpt_oss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama_gqa", "gemma3_text", "gemma2")),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Sinks and windows; GQA; windows beside full attention; capped scores."""
    return load_model(save_tiny(request.param, tmp_path_factory.mktemp(request.param)))


def check_selection(model: LoadedModel, page_size: int, share: float = 1) -> None:
    """All prompts in one step; then, cached or not, each alone in chunks of 50 tokens."""
    top_k, prompts = max(32, page_size), prompts_of(*CONTEXTS)
    for name, budget in (("batch", 512), ("chunks", 50)):
        engine = selecting_core(model, top_k, top_k + 5, page_size=page_size, max_num_batched_tokens=budget)
        for warm in (False, True):
            if budget == 512:
                found = run(engine, prompts, GREEDY, f"{name} {warm}")
            else:
                found = [run(engine, [prompt], GREEDY, f"{name} {warm} {len(prompt)}")[0] for prompt in prompts]
            likely = 0
            for prompt, tokens in zip(prompts, found, strict=True):
                cached = (len(prompt) - 1) // page_size * page_size if warm else 0
                decoded = len(prompt) - (len(prompt) - cached == 1)
                likely += count_likely(model, prompt, tokens, decoded=decoded, page_size=page_size, top_k=top_k)
            assert likely >= share * sum(map(len, found))
        counts = engine.statistics()
        assert counts["hit_tokens"] > 0
        assert min(counts["hisparse"][name] for name in ("hit_tokens", "swapped_tokens")) > 0
        engine.close()


def test_tokens_are_those_of_the_same_selection(model: LoadedModel) -> None:
    check_selection(model, 16)


@slow_unless_changed(*HISPARSE)
@pytest.mark.parametrize(
    ("page_size", "dtype", "share"),
    [
        pytest.param(1, "float32", 1, marks=pytest.mark.slow),
        pytest.param(64, "float32", 1, marks=pytest.mark.slow),
        (16, "bfloat16", 0.9),
    ],
)
def test_other_pages_and_numbers(page_size: int, dtype: str, share: float, tmp_path: Path) -> None:
    """In bfloat16 limits and logits are often nearly equal."""
    check_selection(load_model(save_tiny("llama_gqa", tmp_path), dtype=dtype), page_size, share)


@contextmanager
def bounds_checked(*, exact: bool) -> Iterator[list[int]]:
    """Compare the bounds of all pages of a step with the keys in host memory, after every call. Yields the number of
    pages that were compared. Rejected drafts leave bounds that are not `exact`."""
    real, compared = attention._attend_pages, [0]

    def attend(*given: Any) -> torch.Tensor:
        out = real(*given)
        kept, (bounds, batch) = given[4], given[5]
        size = batch.page_size
        for row, context in enumerate(batch.context_lens.tolist()):
            for page in range(-(-context // size)):
                slots = torch.arange(min(size, context - page * size)) + int(kept.batch.frames[row, page]) * size
                keys = kept.fields.gather(slots, kept.key.dtype)[0]
                low, high = (stored[int(batch.frames[row, page])] for stored in (bounds._low, bounds._high))
                if exact:
                    assert torch.equal(low, keys.amin(0)) and torch.equal(high, keys.amax(0))
                assert (low <= keys).all() and (high >= keys).all()
                compared[0] += 1
        return out

    with patch.object(attention, "_attend_pages", attend):
        yield compared


@slow_unless_changed(*HISPARSE)
def test_bounds_follow_pages_through_preemption_and_reuse(model: LoadedModel) -> None:
    engine = selecting_core(model, 32, 37, tokens=256)
    with bounds_checked(exact=True) as compared:
        prompts = prompts_of(20, 35, 41, 47, 50, 60)
        for name, some in (
            ("first", prompts),
            ("again", prompts),
            ("alone", prompts[-1:]),
            ("and again", prompts[-1:]),
        ):
            run(engine, some, LONG, name)
    found = engine.statistics()
    assert found["preemptions"] > 0 and found["hit_tokens"] > 0 and compared[0] > 1000
    engine.close()


def test_rejected_drafts_only_loosen_bounds(model: LoadedModel) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    engine = selecting_core(model, 32, 37, speculative_config=drafts)
    speculator = drafts_freely(engine)
    prompts = [[5, 6, 7, 8] * 12, [9, 4, 9, 4] * 20]
    with bounds_checked(exact=False):
        run(engine, prompts, GREEDY)
    assert speculator.counted().draft_tokens > 0
    engine.close()


def test_models_whose_layers_share_keys_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="attention of its own"):
        selecting_core(LoadedModel(build_hybrid("gemma3n_text"), name="shared"), 32, 37)


def test_a_start_says_that_outputs_differ(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    engine = selecting_core(model, 32, 37)
    assert "is lossy" in caplog.text and engine.statistics()["hisparse"]["lossy"] is True
    engine.close()


def test_a_top_k_of_the_context_gives_the_tokens_of_full_attention(model: LoadedModel) -> None:
    prompts = prompts_of(*CONTEXTS)
    engine = selecting_core(model, 160, 160, max_num_batched_tokens=50)
    assert run(engine, prompts, GREEDY) == run(core_for(model, max_num_batched_tokens=50), prompts, GREEDY)
    engine.close()
