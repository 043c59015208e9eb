"""Compressed attention: windows, folded entries, rings and an indexer on pools equal the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.engine.kv_error import measure_kv_errors

from quire.errors import ModelCheckFailed
from quire.models import compressed
from quire.models.hf import LoadedModel, load_model
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.kv_format import KV_FORMATS
from quire.spec.layers import CompressedCall
from quire.spec.layout import DType
from tests.changes import MODELS, unless_changed
from tests.engine.running import core_for, generated, run, shared_prompts, tight_core
from tests.models.schedule import Schedule, Step, long_steps
from tests.tiny_hybrids import HYBRIDS, build_hybrid
from tests.tiny_models import VOCAB_SIZE, save_tiny
from tests.verified_models import VERIFIED

pytestmark = unless_changed(__name__, *MODELS)

HEADS: dict[str, Any] = {"index_n_heads": 8}
"""Enough that no two keys of the indexer score alike, as they do where all scores of both are cut off at zero."""
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

AROUND_A_BLOCK: tuple[Step, ...] = (
    {"a": (0, 126)},
    {"a": (126, 127), "b": (0, 3)},
    {"a": (127, 128), "b": (3, 4)},
    {"a": (128, 129), "b": (4, 130)},
    {"a": (129, 131), "b": (130, 131), "c": (128, 131)},
    *(dict.fromkeys("abc", (at, at + 1)) for at in range(131, 143)),
    {"a": (143, 300), "b": (143, 255), "c": (143, 250)},
    {"a": (300, 301), "b": (255, 256), "c": (250, 257)},
    {"a": (301, 302), "b": (256, 257), "c": (257, 258)},
)
"""Blocks that are completed by chunks and by single tokens, across pages, and by a sequence that resumes a page."""


def save(folder, **settings: Any) -> str:
    return str(save_tiny("llama_gqa", folder, **{**HYBRIDS["deepseek_v4"], **HEADS, **settings}))


@pytest.mark.parametrize(
    ("page_size", "steps", "settings"),
    [
        (128, AROUND_A_BLOCK, {}),
        (128, AROUND_A_BLOCK, {"sliding_window": 9, "index_topk": 64}),
        (128, AROUND_A_BLOCK, {"sliding_window": 130, "index_topk": 1}),
        (128, AROUND_A_BLOCK, {"num_hidden_layers": 4, "compress_ratios": [4, 4, 128, 0]}),
        (256, long_steps(600, shared=256), {"sliding_window": 16}),
    ],
)
def test_mixed_schedule_equals_the_plain_model(page_size, steps, settings, tmp_path):
    model = load_model(save(tmp_path, **settings))
    assert [group.name for group in model.spec.groups(page_size)] == ["full", "indexer", "window"]
    reference = build_hybrid("deepseek_v4", attn_implementation="eager", **HEADS, **settings)
    assert Schedule(steps, page_size=page_size).largest_error(model, reference) < 1e-4


def case_of(folder: Path, seed: int = 7) -> tuple[LoadedModel, list[list[int]], list[list[int]]]:
    """A model, prompts of which some begin alike, and what transformers generates."""
    reference = build_hybrid("deepseek_v4", **HEADS)
    prompts = shared_prompts(seed, shared=128, tails=(3, 120, 11, 1, 200), vocabulary=VOCAB_SIZE)
    return load_model(save(folder)), prompts, [generated(reference, prompt, GREEDY.max_tokens) for prompt in prompts]


def test_generated_tokens_equal_those_of_transformers(tmp_path):
    model, prompts, expected = case_of(tmp_path)
    core = core_for(model, page_size=128, max_num_batched_tokens=150)
    assert run(core, prompts, GREEDY, "cold") == expected
    assert run(core, prompts, GREEDY, "warm") == expected
    assert core.statistics()["hit_tokens"] > 0
    assert check_starved(model, prompts, expected, pages=7, windows=5)["frames"]["window"]["dropped"] > 0


def test_keys_of_indexers_lie_beside_latents_in_an_arena(tmp_path):
    """Prompts of two beginnings push each other to host memory, and come back."""
    (model, prompts, expected), (_, *others) = case_of(tmp_path), case_of(tmp_path, seed=8)
    prompts, expected = prompts + others[0], expected + others[1]
    found = check_starved(model, prompts, expected, pages=3, windows=3, arena=True, canary="all", host_memory=2**22)
    assert sorted(found["frames"]) == ["full", "window"]
    assert found["tiers"]["loaded_bytes"] > 0 and not found["canary"]["found_pages"]


def check_starved(
    model: LoadedModel,
    prompts: list[list[int]],
    expected: list[list[int]],
    *,
    pages: int,
    windows: int,
    **settings: Any,
) -> Any:
    """In pools of few pages and windows, which are dropped and computed again with their rings."""
    core = tight_core(
        model,
        num_tokens=pages * 128,
        window_tokens=windows * 128,
        page_size=128,
        max_num_batched_tokens=70,
        max_running_requests=3,
        **settings,
    )
    for turn in range(2):
        assert run(core, prompts, GREEDY, f"turn{turn}") == expected
    core.audit()
    statistics = core.statistics()
    core.close()
    assert statistics["hit_tokens"] > 0
    return statistics


def test_what_is_kept(tmp_path):
    model = load_model(save(tmp_path))
    assert all(isinstance(call, CompressedCall) for call in model.spec.calls)
    assert [call.ratio for call in model.spec.calls] == [0, 128, 4]
    assert "deepseek_v4" in VERIFIED


def test_half_precision_passes_its_check(tmp_path):
    """In bfloat16; in float16, transformers' own modules disagree on a dtype."""
    assert load_model(save(tmp_path), dtype="bfloat16").spec.dtype is DType.BFLOAT16


def test_other_formats_keep_entries_too(tmp_path):
    """Each call's output, where its rows and entries are FP8 rows, is off by little more than they are."""
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 300).astype(np.int32)
    (found,) = measure_kv_errors(load_model(save(tmp_path)), [KV_FORMATS["fp8_e4m3"]], tokens)
    assert [call.ordinal for call in found.calls] == [0, 1, 2]
    assert all(0.01 < call.output < 0.06 for call in found.calls)
    assert {field.name for field in found.calls[2].fields} >= {"latent", "compressed_latent", "index_k"}


@pytest.mark.parametrize("broken", ["ring", "entries", "selection"])
def test_the_check_at_load_notices(broken, tmp_path, monkeypatch):
    folder = save(tmp_path, index_topk=1)
    if broken == "ring":
        original = compressed._Folding.__init__

        def forgetting(plan, batch, call, ring, device):
            original(plan, batch, call, ring, device)
            plan.stored_rows, plan.stored_slots = plan.stored_rows[:0], plan.stored_slots[:0]

        monkeypatch.setattr(compressed._Folding, "__init__", forgetting)
    elif broken == "entries":
        monkeypatch.setattr(compressed._Compressing, "_store", lambda *_: None)
    else:
        selected = compressed._Selector.select
        monkeypatch.setattr(compressed._Selector, "select", lambda *inputs: selected(*inputs).clamp_min(0).mul(0))
    with pytest.raises(ModelCheckFailed):
        load_model(folder)
