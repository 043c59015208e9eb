"""What a KV dtype costs: the figures against arithmetic of their own, and a layer that it breaks is found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.engine.kv_error import KVError, measure_kv_errors

from quire.errors import InvalidInput
from quire.kernels.codec import decode, encode
from quire.kernels.fields import PagedField
from quire.models.hf import LoadedModel, load_model
from quire.spec.ids import Ids
from quire.spec.kv_format import KV_FORMATS
from tests.tiny_hybrids import build_hybrid
from tests.tiny_latents import build_latent
from tests.tiny_models import VOCAB_SIZE, build_tiny, save_tiny

ENCODED = [name for name, kv_format in KV_FORMATS.items() if kv_format.encodes]
ROUNDING = {"fp8_e4m3": 0.027, "fp8_e5m2": 0.053, "mxfp8": 0.027, "fp4_e2m1": 0.11, "nvfp4": 0.095}
"""What each format costs any smooth vector, which is what random weights give."""
TOKENS: Ids = np.random.default_rng(0).integers(1, VOCAB_SIZE, 300).astype(np.int32)  # more than a step holds
BROKEN = 1  # layer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny("llama_gqa", tmp_path_factory.mktemp("plain"), head_dim=32)))


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Keys of one layer have two channels of 1,500, from a bias, as some published models do: nothing tells tokens
    apart there, and an FP8 step at that size is larger than all other channels."""
    folder: Path = tmp_path_factory.mktemp("outlier")
    built = build_tiny("qwen2", num_attention_heads=2, num_key_value_heads=2)
    with torch.no_grad():
        built.model.layers[BROKEN].self_attn.k_proj.bias[30:32] += 1500.0
    built.save_pretrained(folder)
    return load_model(str(folder))


def measured(model: LoadedModel, *names: str, tokens: Ids = TOKENS, **options: Any) -> list[KVError]:
    return list(measure_kv_errors(model, [KV_FORMATS[name] for name in names], tokens, **options))


def keys_and_values(model: LoadedModel, tokens: Ids) -> list[dict[str, torch.Tensor]]:
    """Per layer, what transformers' own cache holds after the same prompt."""
    model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        cache = model.module(input_ids=torch.from_numpy(tokens[None].astype(np.int64)), use_cache=True).past_key_values
    model.module.set_attn_implementation("quire")
    return [{"k": layer.keys[0], "v": layer.values[0]} for layer in cache.layers]


def test_fields_are_compared_with_what_transformers_keeps(model: LoadedModel) -> None:
    """The same arithmetic on keys and values that never were in a pool."""
    kept = keys_and_values(model, TOKENS)
    for error in measured(model, *ENCODED):
        assert [(call.ordinal, call.layer) for call in error.calls] == [(0, 0), (1, 1), (2, 2)]
        for call, rows in zip(error.calls, kept, strict=True):
            assert [field.name for field in call.fields] == ["k", "v"]
            for field in call.fields:
                given = rows[field.name]
                found = decode(*encode(given, error.kv_format), error.kv_format, torch.float32)
                assert field.relative == pytest.approx(float((found - given).norm() / given.norm()), rel=1e-3)
                assert field.largest == pytest.approx(float((found - given).abs().max()), rel=1e-2)
                assert field.magnitude == pytest.approx(float(given.abs().max()), rel=1e-5)
                assert field.saturated == field.nan == 0
                assert field.count == given.numel()


def test_a_sound_model_pays_what_rounding_costs(model: LoadedModel) -> None:
    """Keys and values are off by the rounding of the format, attention by some of it, and the logits follow."""
    errors = {error.kv_format.name: error for error in measured(model, *ENCODED)}
    for name, error in errors.items():
        for call in error.calls:
            assert [field.relative for field in call.fields] == pytest.approx([ROUNDING[name]] * 2, rel=0.1)
            assert 0.3 * ROUNDING[name] < call.output < 4 * ROUNDING[name]
    order = ("fp8_e4m3", "fp8_e5m2", "nvfp4")
    logits, kept = ([getattr(errors[name], what) for name in order] for what in ("logits", "kept_share"))
    assert 0 < logits[0] < logits[1] < logits[2]
    assert 1 > kept[0] > kept[1] > kept[2] > 0
    assert errors["fp8_e4m3"].logits < 0.2
    assert errors["fp8_e4m3"].bytes_per_token * 4 == errors["fp8_e4m3"].plain_bytes_per_token


def test_the_models_own_dtype_costs_nothing(model: LoadedModel) -> None:
    [error] = measured(model, "float32")
    assert error.calls == ()
    assert (error.logits, error.kept_share, error.same_next_token) == (0, 1, True)
    [narrow] = measured(model, "bfloat16")
    assert all(0 < field.relative < 2**-8 for call in narrow.calls for field in call.fields)
    assert 0 < narrow.logits < 0.02


@pytest.mark.parametrize("name", ["fp8_e5m2", "nvfp4"])
def test_a_layer_that_a_format_breaks_is_named(outlier: LoadedModel, name: str) -> None:
    """Its keys lose less of their norm than those of other layers, most of which is in two channels that are no use."""
    [error] = measured(outlier, name)
    assert [call.layer for call in error.above(0.25)] == [BROKEN]
    broken, sound = error.calls[BROKEN], error.calls[0]
    assert broken.fields[0].relative < 0.5 * sound.fields[0].relative
    assert broken.output > 2 * sound.output
    assert broken.fields[0].magnitude > 1000


def test_numbers_beyond_the_format_are_counted(outlier: LoadedModel) -> None:
    """Two channels of each token, in one layer, which FP8 cuts to 448."""
    [error] = measured(outlier, "fp8_e4m3", tokens=TOKENS[:50])
    counts = [[field.saturated for field in call.fields] for call in error.calls]
    assert counts == [[0, 0], [2 * 50, 0], [0, 0]]
    assert error.calls[BROKEN].fields[0].relative > 0.5


def test_each_call_is_measured_from_sound_inputs(outlier: LoadedModel) -> None:
    """The layer after the broken one is as good as without it, while the logits have all errors in them."""
    [error] = measured(outlier, "fp8_e5m2")
    assert error.calls[2].output < 0.15 < error.logits


def test_rows_of_sparse_latents_and_keys_of_their_indexers() -> None:
    """Blocks of 128 with a float32 scale beside a bfloat16 rotary key; an indexer's keys go by no attention call."""
    model = LoadedModel(build_latent("deepseek_v32"), name="sparse")
    [error] = measured(model, "fp8_e4m3", tokens=TOKENS[:100])
    for call in error.calls:
        found = {field.name: field.relative for field in call.fields}
        assert found == pytest.approx({"latent": 0.025, "rope": 0.0017, "index_k": 0.025}, rel=0.1)
        assert 0 < call.output < 0.1


def test_layers_that_read_the_keys_of_others_are_measured_where_these_are_kept() -> None:
    model = LoadedModel(build_hybrid("gemma3n_text"), name="shared")
    [error] = measured(model, "nvfp4", tokens=TOKENS[:100])
    keeping = [layer for layer, calls in enumerate(model.spec.layers) if calls]
    assert len(keeping) < len(model.spec.layers)
    assert [call.layer for call in error.calls] == keeping
    assert all(0.05 < call.output < 0.4 for call in error.calls)


def test_states_are_never_encoded() -> None:
    """Layers with a state have no row, and a model with nothing else has none at all."""
    [error] = measured(LoadedModel(build_hybrid("qwen3_next"), name="hybrid"), "nvfp4", tokens=TOKENS[:100])
    assert [call.layer for call in error.calls] == [3]
    [error] = measured(LoadedModel(build_hybrid("mamba2"), name="states"), "nvfp4", tokens=TOKENS[:100])
    assert error.calls == error.above(0) == ()
    assert error.logits == 0


def test_the_order_of_steps_is_no_part_of_the_answer(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    [whole] = measured(model, "mxfp8")
    monkeypatch.setattr("bench.engine.kv_error._CHUNK", 37)
    steps: list[tuple[int, int]] = []
    [parts] = measured(model, "mxfp8", on_progress=lambda done, total: steps.append((done, total)))
    assert parts.logits == pytest.approx(whole.logits, rel=1e-2)
    assert [call.output for call in parts.calls] == pytest.approx([call.output for call in whole.calls], rel=1e-3)
    assert steps == [(i, 18) for i in range(1, 19)]


def test_scales_that_are_lost_are_noticed(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PagedField.write

    def write(stored: PagedField, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        new = real(stored, slots, rows)
        scales = stored.stored[1]
        if scales is not None:
            scales.zero_()
        return new

    monkeypatch.setattr(PagedField, "write", write)
    for error in measured(model, "mxfp8", "nvfp4"):
        assert len(error.above(0.9)) == 3


def test_what_is_not_a_number_is_above_any_limit(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PagedField.write

    def write(stored: PagedField, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if stored._kv_format is not None:
            rows = rows.clone()
            rows[3, 0, 0] = torch.inf
        return real(stored, slots, rows)

    monkeypatch.setattr(PagedField, "write", write)
    [error] = measured(model, "nvfp4", tokens=TOKENS[:10])
    assert len(error.above(1e9)) == 3
    assert [field.nan for field in error.calls[0].fields] == [16, 16]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [([], "has 0 tokens"), ([1] * 513, "1 to 512"), ([VOCAB_SIZE], "vocabulary of 256"), ([-1], "vocabulary of 256")],
)
def test_a_prompt_that_cannot_be_measured(model: LoadedModel, tokens: list[int], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        measured(model, "fp8_e4m3", tokens=np.array(tokens, dtype=np.int32))


def test_a_format_that_does_not_fit_is_refused_before_anything_runs(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = load_model(str(save_tiny("llama_gqa", tmp_path, head_dim=24)))
    monkeypatch.setattr(LoadedModel, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(InvalidInput, match="24 numbers cannot be stored as mxfp8"):
        measured(narrow, "fp8_e4m3", "mxfp8")
