"""Block-sparse attention: blocks that an indexer selects per KV head equal those of the plain model."""

from __future__ import annotations

import pytest

from quire.errors import ModelCheckFailed, UnsupportedModel
from quire.kernels import tiles
from quire.models import block_sparse
from quire.models.hf import LoadedModel, load_model
from quire.scheduler.sampling_params import SamplingParams
from tests.covering import covering
from tests.engine.running import core_for, generated, run, shared_prompts
from tests.models.schedule import STEPS, Schedule, long_steps
from tests.tiny_hybrids import HYBRIDS, build_hybrid
from tests.tiny_models import VOCAB_SIZE, save_tiny
from tests.verified_models import VERIFIED

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = shared_prompts(7, shared=37, tails=(3, 20, 11, 1, 29), vocabulary=VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny("llama_gqa", tmp_path_factory.mktemp("blocks"), **HYBRIDS["minimax_m3"]))


@covering(case=[(1, STEPS), (4, STEPS), (16, long_steps(150)), (64, long_steps(320))], pairs=[30, tiles.MAX_PAIRS])
def test_mixed_schedule_equals_the_plain_model(folder, case, pairs, monkeypatch):
    page_size, steps = case
    monkeypatch.setattr(tiles, "MAX_PAIRS", pairs)
    reference = build_hybrid("minimax_m3", attn_implementation="eager")
    assert Schedule(steps, page_size=page_size).largest_error(load_model(folder), reference) < 1e-4


def test_generated_tokens_equal_those_of_transformers(folder):
    reference = build_hybrid("minimax_m3")
    expected = [generated(reference, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    core = core_for(load_model(folder), page_size=16, max_num_batched_tokens=50)
    assert run(core, PROMPTS, GREEDY, "cold") == expected
    assert run(core, PROMPTS, GREEDY, "warm") == expected


def test_only_sparse_layers_keep_index_keys(folder):
    assert [call.index_dim for call in load_model(folder).spec.calls] == [0, 16, 0, 16]
    assert HYBRIDS["minimax_m3"]["model_type"] in VERIFIED


def test_a_selection_that_lacks_a_block_is_noticed(folder, monkeypatch):
    original = block_sparse._BlockAttention._attend_blocks

    def without_the_last(attention, query, selected, *others):
        return original(attention, query, selected[..., :-1], *others)

    monkeypatch.setattr(block_sparse._BlockAttention, "_attend_blocks", without_the_last)
    with pytest.raises(ModelCheckFailed):
        load_model(folder)


def test_other_heads_than_kv_heads_are_refused():
    settings = {**HYBRIDS["minimax_m3"]["sparse_attention_config"], "sparse_num_index_heads": 1}
    with pytest.raises(UnsupportedModel, match="selects blocks with 1 heads for 2 KV heads"):
        LoadedModel(build_hybrid("minimax_m3", sparse_attention_config=settings), name="blocks")
