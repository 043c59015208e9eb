"""Latent attention on latents: logits and generated tokens equal the plain model's, dense and sparse."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quire.errors import ModelCheckFailed
from quire.kernels import tiles
from quire.models import sparse
from quire.models.forward import in_forward
from quire.models.hf import LoadedModel, load_model
from quire.models.indexers import IndexKeys
from quire.models.latent import LatentAttention
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.layers import LatentCall
from tests.changes import MODELS, unless_changed
from tests.covering import covering
from tests.engine.running import core_for, generated, run, shared_prompts
from tests.engine.test_hybrid_tokens import SERVED
from tests.models.schedule import STEPS, Schedule, long_steps
from tests.tiny_latents import LATENTS, SPARSE, build_latent, save_latent
from tests.tiny_models import VOCAB_SIZE
from tests.verified_models import VERIFIED

pytestmark = unless_changed(__name__, *MODELS)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = shared_prompts(7, shared=37, tails=(3, 20, 11, 1, 29), vocabulary=VOCAB_SIZE)


@pytest.fixture(scope="module", params=LATENTS)
def loaded(request, tmp_path_factory) -> tuple[str, LoadedModel]:
    name = request.param
    return name, load_model(save_latent(name, tmp_path_factory.mktemp(name)))


@covering(name=LATENTS, case=[(1, STEPS), (4, STEPS), (16, long_steps(150)), (64, long_steps(150))])
def test_mixed_schedule_equals_the_plain_model(name, case, tmp_path):
    """Of contexts no longer than this; in longer ones, two keys of an indexer score alike but for rounding."""
    model, (page_size, steps) = load_model(save_latent(name, tmp_path)), case
    reference = build_latent(name, attn_implementation="eager")
    assert Schedule(steps, page_size=page_size).largest_error(model, reference) < 1e-4


@pytest.mark.parametrize("loaded", [name for name in LATENTS if name not in SERVED], indirect=True)
def test_generated_tokens_equal_those_of_transformers(loaded):
    """Through the engine, in mixed batches, and again with the prompts found in the cache. Those that are served are
    compared in tests/engine/test_hybrid_tokens.py."""
    name, model = loaded
    reference = build_latent(name)
    expected = [generated(reference, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    core = core_for(model, page_size=16, max_num_batched_tokens=50)
    assert run(core, PROMPTS, GREEDY, "cold") == expected
    assert run(core, PROMPTS, GREEDY, "warm") == expected
    assert core.statistics()["hit_tokens"] > 0


def test_only_latents_are_kept(loaded):
    name, model = loaded
    rank, rope_dim, index_dim = 64, 32, 64 if name in SPARSE else 0
    assert all(isinstance(call, LatentCall) for call in model.spec.calls)
    owners = sum(call.index_dim > 0 for call in model.spec.calls)
    numbers = len(model.spec.calls) * (rank + rope_dim) + owners * index_dim
    assert sum(group.layout.bytes_per_token for group in model.spec.groups(16)) == 4 * numbers


def test_every_type_is_listed():
    assert {settings["model_type"] for settings in LATENTS.values()} <= VERIFIED


@covering(name=["deepseek_v3", "longcat_flash", "hy_v4"], expanded=[False, True])
def test_both_ways_give_the_same(name, expanded, tmp_path, monkeypatch):
    monkeypatch.setattr(LatentAttention, "expands", lambda attention, new, contexts: np.full(len(new), expanded))
    model = load_model(save_latent(name, tmp_path))
    reference = build_latent(name, attn_implementation="eager")
    assert Schedule(long_steps(150), page_size=16).largest_error(model, reference) < 1e-4


def test_long_chunks_are_expanded_and_decodes_are_not():
    """With the widths of DeepSeek-V3, over a context of 8,192 tokens."""
    attention = object.__new__(LatentAttention)
    attention.rank, attention._key_dim, attention.value_dim = 512, 128, 128
    new = np.array([1, 16, 128, 256, 8192])
    assert attention.expands(new, np.full(5, 8192)).tolist() == [False, False, False, True, True]


@covering(name=["deepseek_v3", "hy_v4"], dtype=["bfloat16", "float16"])
def test_half_precision_passes_its_check(name, dtype, tmp_path):
    """An indexer's keys are FP8 then."""
    model = load_model(save_latent(name, tmp_path), dtype=dtype)
    assert str(model.spec.dtype) == dtype


def test_a_selection_that_lacks_a_token_is_noticed(tmp_path, monkeypatch):
    folder = save_latent("deepseek_v32", tmp_path)
    original = sparse._Indexer.__call__

    def without_the_best(indexer, *inputs, **others):
        found = original(indexer, *inputs, **others)
        if in_forward():
            found[..., :1] = -1
        return found

    monkeypatch.setattr(sparse._Indexer, "__call__", without_the_best)
    with pytest.raises(ModelCheckFailed, match="differs by"):
        load_model(folder)


def test_index_keys_that_are_not_stored_are_noticed(tmp_path, monkeypatch):
    folder = save_latent("deepseek_v32", tmp_path)
    monkeypatch.setattr(IndexKeys, "update", lambda keys, new: new[:, :1])
    with pytest.raises(ModelCheckFailed):
        load_model(folder)


@pytest.mark.parametrize("size", [1, 40, 1000])
def test_tiles_of_any_size_select_the_same(size, tmp_path, monkeypatch):
    """However few pairs an indexer may score at once."""
    monkeypatch.setattr(tiles, "MAX_PAIRS", size)
    model = load_model(save_latent("glm_moe_dsa", tmp_path))
    reference = build_latent("glm_moe_dsa", attn_implementation="eager")
    assert Schedule().largest_error(model, reference) < 1e-4


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path):
    folder = save_latent("deepseek_v3", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "code.KimiK2Config"}}))
    model = load_model(folder)
    assert type(model.module).__name__ == "DeepseekV3ForCausalLM"
    assert {type(call) for call in model.spec.calls} == {LatentCall}
