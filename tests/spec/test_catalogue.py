"""The catalogue against published configuration files, published sizes, and itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.spec.catalogue import CATALOGUE, CatalogueModel, catalogue_model, close_names
from tests.covering import each_of

CONFIGS = Path(__file__).parents[3] / "shared" / "data" / "configs"

REQUANTISED = {
    "deepseek-v4-pro": "nvidia/DeepSeek-V4-Pro-NVFP4",
    "kimi-k2.5": "nvidia/Kimi-K2.5-NVFP4",
    "llama-4-scout": "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
    "nemotron-3-super-120b-a12b": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "qwen3-235b-a22b": "nvidia/Qwen3-235B-A22B-NVFP4",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B-FP8",
    "qwen3.5-122b-a10b": "nvidia/Qwen3.5-122B-A10B-NVFP4",
}
"""Models whose own file is not recorded, with a file of the same model in other weights."""

LEFT_TO_THE_CLASS = {
    "gemma-3-27b": {"tie_word_embeddings"},
    "llama-4-maverick": {"tie_word_embeddings"},
    "llama-4-scout": {"tie_word_embeddings"},
    "minimax-m1": {"torch_dtype"},
    "minimax-m2.5": {"torch_dtype"},
    "step-3.7-flash": {"tie_word_embeddings"},
}
"""Fields the catalogue writes out and the recorded file does not state."""

SIZES = {
    "command-r-plus": 103.8e9,
    "gemma-2-9b": 9.24e9,
    "gemma-3-27b": 27.0e9,
    "llama-2-70b": 68.98e9,
    "llama-3.1-405b": 405.9e9,
    "llama-3.1-70b": 70.55e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.2-1b": 1.24e9,
    "mistral-7b-v0.1": 7.24e9,
    "mistral-large-123b": 122.6e9,
    "mistral-nemo-12b": 12.25e9,
    "mistral-small-24b": 23.57e9,
    "olmo-2-32b": 32.2e9,
    "phi-4": 14.66e9,
    "qwen2.5-0.5b": 0.494e9,
    "qwen2.5-72b": 72.7e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-32b": 32.76e9,
    "smollm3-3b": 3.08e9,
}
"""Published parameter counts of dense models with a gated MLP in every layer."""

MISSING = object()


def recorded(model: CatalogueModel) -> Path:
    return CONFIGS / (REQUANTISED.get(model.name, model.hub).replace("/", "__") + ".json")


def published(config: Mapping[str, Any], field: str) -> Any:
    """The file's value, the language model's part first. `architectures` names the whole."""
    text = config.get("text_config") or {}
    parts = (config,) if field == "architectures" else (text, config)
    names = ("torch_dtype", "dtype") if field == "torch_dtype" else (field,)
    return next((part[name] for part in parts for name in names if name in part), MISSING)


def within(ours: Any, theirs: Any) -> bool:
    """Whether `theirs` says all that `ours` says, and may say more inside objects."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return all(key in theirs and within(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(within, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


RECORDED = [model for model in CATALOGUE.values() if recorded(model).exists()]


@pytest.mark.skipif(not CONFIGS.exists(), reason="no recorded configurations: shared/data is not beside the repo")
class TestAgainstRecordedFiles:
    @each_of("model", RECORDED)
    def test_every_field_is_the_published_one(self, model: CatalogueModel) -> None:
        config = json.loads(recorded(model).read_text())
        ours = dict(model.config)
        if model.name in REQUANTISED:
            ours.pop("quantization_config", None)
        theirs = {field: published(config, field) for field in ours}
        unstated = {field for field, value in theirs.items() if value is MISSING}
        assert unstated == LEFT_TO_THE_CLASS.get(model.name, set())
        for field in ours.keys() - unstated:
            assert within(ours[field], theirs[field]), f"{field}: {ours[field]} here, {theirs[field]} in the file"

    @each_of("model", [model for model in RECORDED if model.name not in REQUANTISED])
    def test_a_quantised_file_makes_a_quantised_entry(self, model: CatalogueModel) -> None:
        stated = published(json.loads(recorded(model).read_text()), "quantization_config")
        assert ("quantization_config" in model.config) == (stated is not MISSING)

    def test_most_of_the_recorded_models_are_here(self) -> None:
        assert len(RECORDED) >= 45
        assert set(REQUANTISED) | set(LEFT_TO_THE_CLASS) <= {model.name for model in RECORDED}


def test_names() -> None:
    assert len(CATALOGUE) >= 60
    assert all(name == model.name == name.lower() for name, model in CATALOGUE.items())
    hubs = [model.hub.lower() for model in CATALOGUE.values()]
    assert len(set(hubs)) == len(hubs)
    assert all(hub.count("/") == 1 for hub in hubs)
    assert not set(hubs) & set(CATALOGUE)


@each_of("model", CATALOGUE.values())
def test_every_entry_is_a_json_object_with_the_common_fields(model: CatalogueModel) -> None:
    config = json.loads(json.dumps(model.config))
    assert config == model.config
    assert len(config["architectures"]) == 1
    assert config["torch_dtype"] in ("float16", "bfloat16", "float32")
    assert isinstance(config["tie_word_embeddings"], bool)
    assert config["vocab_size"] > 0
    assert {"model_type"} <= config.keys()
    assert config.keys() & {"max_position_embeddings", "n_positions"}
    layers = config.get("num_hidden_layers")
    for field in ("layer_types", "attn_type_list", "hybrid_layer_pattern", "indexer_types", "block_configs"):
        assert layers is None or len(config.get(field, range(layers))) == layers, field
    assert layers is None or len(config.get("hybrid_override_pattern", "-" * layers)) == layers


def test_lookup_takes_either_name_in_any_case() -> None:
    model = CATALOGUE["llama-3.1-70b"]
    assert catalogue_model("llama-3.1-70b") is model
    assert catalogue_model(" LLaMA-3.1-70B ") is model
    assert catalogue_model("META-llama/llama-3.1-70b-INSTRUCT") is model
    assert catalogue_model("llama-9") is None
    assert catalogue_model("") is None


def test_close_names() -> None:
    assert close_names("lama-3.1-70b")[0] == "llama-3.1-70b"
    assert close_names("DeepSeek-V3.3")[0].startswith("deepseek-v3")
    assert len(close_names("qwen3")) <= 3
    assert close_names("quire-bundled-windows")[0] == "quire-bundled-window"
    assert close_names("zzzzzz") == []


def parameters(config: Mapping[str, Any]) -> int:
    """Weights of a dense model with a gated MLP: embeddings, attention and MLP, without norms and biases."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_dim * (heads + config["num_key_value_heads"])
    mlp = 3 * hidden * config["intermediate_size"]
    embeddings = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return int(config["num_hidden_layers"] * (attention + mlp) + embeddings)


@pytest.mark.parametrize("name", SIZES)
def test_dense_models_have_their_published_size(name: str) -> None:
    assert parameters(CATALOGUE[name].config) == pytest.approx(SIZES[name], rel=0.03)


def test_importing_it_loads_no_tensor_library() -> None:
    check = "import sys, quire.spec.catalogue; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
