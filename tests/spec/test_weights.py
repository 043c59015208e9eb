"""Weight estimates against models that transformers builds, published sizes and bytes worked out by hand."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from quire.errors import UnsupportedModel
from quire.spec.config_reader import ConfigReader
from quire.spec.layout import DType
from quire.spec.weights import WeightEstimate, read_weights
from quire.spec.weights.estimate import LayerWeights
from tests.changes import SPECS, slow_unless_changed
from tests.covering import each_of
from tests.tiny_models import _SIZES, ARCHITECTURES

CONFIGS = Path(__file__).parents[3] / "shared" / "data" / "configs"
FILES = sorted(path.stem for path in CONFIGS.glob("*.json")) if CONFIGS.exists() else []

needs_configs = pytest.mark.skipif(not FILES, reason=f"no real configurations: {CONFIGS.name} is not beside the repo")


def real(name: str) -> dict[str, Any]:
    return dict(json.loads((CONFIGS / f"{name}.json").read_text()))


def estimate(settings: Mapping[str, Any], dtype: DType | None = None) -> WeightEstimate:
    return read_weights(ConfigReader(settings), dtype=dtype)


def total(layer: LayerWeights) -> int:
    return sum(each.num_parameters for each in layer)


def build(settings: Mapping[str, Any], auto: Any = AutoModelForCausalLM) -> Any:
    """The model on the meta device: shapes without memory. Its saved configuration is what a checkpoint would have."""
    settings = {
        k: v for k, v in settings.items() if k not in ("quantization_config", "auto_map", "torch_dtype", "dtype")
    }
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return auto.from_config(AutoConfig.for_model(**settings))


def size(model: Any) -> int:
    return sum(int(parameter.numel()) for parameter in model.parameters())


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(verbosity)


# -- every real configuration

REFUSED: dict[str, str] = {}
"""File to a part of the refusal. Empty: every one of them can be estimated."""

PUBLISHED = {
    "LGAI-EXAONE__EXAONE-4.0-32B": 32.0e9,
    "MiniMaxAI__MiniMax-M1-80k": 456e9,
    "MiniMaxAI__MiniMax-M2.5": 229e9,
    "Qwen__Qwen2.5-7B": 7.61e9,
    "Qwen__Qwen3-30B-A3B-FP8": 30.5e9,
    "Qwen__Qwen3-32B": 32.8e9,
    "Qwen__Qwen3-Coder-480B-A35B-Instruct": 480e9,
    "Qwen__Qwen3.5-27B": 27.4e9,
    "Qwen__Qwen3.5-397B-A17B": 397e9,
    "XiaomiMiMo__MiMo-V2-Flash": 309e9,
    "codellama__CodeLlama-34b-Instruct-hf": 33.7e9,
    "deepseek-ai__DeepSeek-R1": 671e9,
    "deepseek-ai__DeepSeek-V2-Lite": 15.7e9,
    "deepseek-ai__DeepSeek-V4-Flash": 284e9,
    "google__gemma-3-27b-it": 27.4e9,
    "google__gemma-4-26B-A4B": 25.8e9,
    "inclusionAI__Ling-plus": 290e9,
    "meta-llama__Llama-2-70b-hf": 68.98e9,
    "meta-llama__Llama-3.2-1B-Instruct": 1.236e9,
    "meta-llama__Llama-4-Maverick-17B-128E-Instruct": 400e9,
    "mistralai__Devstral-2-123B-Instruct": 123e9,
    "mistralai__Mixtral-8x22B-v0.1": 140.6e9,
    "mistralai__Mixtral-8x7B-v0.1": 46.7e9,
    "moonshotai__Kimi-K2-Instruct": 1.03e12,
    "moonshotai__Kimi-K3": 2.8e12,
    "nvidia__DeepSeek-V4-Pro-NVFP4": 1.6e12,
    "nvidia__Kimi-K2.5-NVFP4": 1.03e12,
    "nvidia__Llama-3_3-Nemotron-Super-49B-v1": 49.9e9,
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6e9,
    "nvidia__NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 120.6e9,
    "nvidia__NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 550e9,
    "nvidia__Nemotron-H-56B-Base-8K": 56.3e9,
    "nvidia__Qwen3-235B-A22B-NVFP4": 235e9,
    "nvidia__Qwen3.5-122B-A10B-NVFP4": 122e9,
    "stepfun-ai__Step-3.7-Flash-FP8": 196e9,
    "zai-org__GLM-4.5": 355e9,
    "zai-org__GLM-5.1": 744e9,
}
"""Parameters by the model's card, rounded as there."""


@slow_unless_changed(*SPECS)
@needs_configs
@each_of("name", FILES)
def test_every_real_configuration_is_estimated(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(UnsupportedModel, match=REFUSED[name]):
            estimate(real(name))
        return
    weights = estimate(real(name))
    assert weights.num_parameters > 0.5e9
    assert 0.4 < weights.bytes_on_rank() / weights.num_parameters <= 2.01


@needs_configs
@each_of("name", PUBLISHED)
def test_totals_are_the_published_sizes(name: str) -> None:
    assert estimate(real(name)).num_parameters == pytest.approx(PUBLISHED[name], rel=0.02)


EXACT = (
    "LGAI-EXAONE__EXAONE-4.0-32B",
    "MiniMaxAI__MiniMax-M2.5",
    "Qwen__Qwen2.5-1.5B",
    "Qwen__Qwen3-30B-A3B-FP8",
    "Qwen__Qwen3.5-397B-A17B",
    "Qwen__Qwen3.5-9B",
    "RedHatAI__DeepSeek-V4-Flash-NVFP4-FP8",
    "XiaomiMiMo__MiMo-V2-Flash",
    "deepseek-ai__DeepSeek-R1",
    "deepseek-ai__DeepSeek-V2-Lite",
    "deepseek-ai__DeepSeek-V3.2",
    "google__gemma-3-27b-it",
    "google__gemma-4-26B-A4B",
    "meta-llama__Llama-3.2-1B-Instruct",
    "meta-llama__Llama-4-Maverick-17B-128E-Instruct",
    "mistralai__Devstral-2-123B-Instruct",
    "mistralai__Mixtral-8x7B-v0.1",
    "nvidia__NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "nvidia__NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "nvidia__Nemotron-H-56B-Base-8K",
    "zai-org__GLM-4.5",
    "zai-org__GLM-5.2",
)


@slow_unless_changed(*SPECS)
@needs_configs
@pytest.mark.parametrize("name", EXACT)
def test_real_language_models_have_the_parameters_of_transformers(name: str) -> None:
    """Within 0.1 %: all that is missing are biases, norms of heads and vectors."""
    settings = real(name)
    weights = estimate(settings)
    text = settings.get("text_config", settings)
    if "tie_word_embeddings" in settings:
        text = {**text, "tie_word_embeddings": settings["tie_word_embeddings"]}
    assert weights.num_parameters - weights.other == pytest.approx(size(build(text)), rel=0.001)


@needs_configs
@pytest.mark.parametrize(
    "name",
    [
        "Qwen__Qwen3-VL-2B-Instruct",
        "Qwen__Qwen3.5-27B",
        "RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
        "google__gemma-3-27b-it",
        "google__gemma-4-26B-A4B",
        "nvidia__Kimi-K2.5-NVFP4",
    ],
)
def test_vision_towers_are_estimated_within_a_tenth(name: str) -> None:
    model = build(real(name), AutoModelForImageTextToText)
    tower = [
        p.numel() for name, p in model.named_parameters() if "language_model" not in name and "lm_head" not in name
    ]
    assert estimate(real(name)).other == pytest.approx(sum(tower), rel=0.1)


@pytest.mark.parametrize(
    ("architecture", "has_head"),
    [
        ("Qwen3ForCausalLM", True),
        ("GPT2LMHeadModel", True),
        ("ChatGLMModel", True),
        ("Qwen3Model", False),
        ("Qwen3ForSequenceClassification", False),
    ],
)
def test_what_generates_no_text_has_no_output_layer(architecture: str, has_head: bool) -> None:
    settings = {**_SIZES, **ARCHITECTURES["qwen3"], "architectures": [architecture], "tie_word_embeddings": False}
    found = estimate(settings)
    assert found.head == (found.embedding if has_head else 0)


# -- tiny models of many architectures

_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 4,
    "index_head_dim": 16,
}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_FOUR_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": {},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128, "mamba_n_groups": 1},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {**_FOUR_EXPERTS, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
    },
    "kimi_linear": {
        **{name: _LATENT[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
        **_FOUR_EXPERTS,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "deepseek_v4": {
        "head_dim": 32,
        "q_lora_rank": 24,
        "o_lora_rank": 16,
        "o_groups": 2,
        "qk_rope_head_dim": 8,
        "num_key_value_heads": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "compress_ratios": [0, 128, 4, 4],
        "num_hash_layers": 1,
    },
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "llama4_text": {"num_local_experts": 4, "interleave_moe_layer_step": 2, "head_dim": 16},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "afmoe": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "biogpt": {"num_key_value_heads": None},
    "jais2": {},
    "falcon": {"intermediate_size": None},
    "bloom": {"intermediate_size": None, "num_key_value_heads": None},
    "gptj": {"intermediate_size": None, "num_key_value_heads": None},
    "mamba": {"num_attention_heads": None},
    "mamba2": {"num_attention_heads": None, "num_heads": 8, "head_dim": 16, "state_size": 16},
}
UNUSED = {
    "mixtral": {"moe_intermediate_size": None},
    "gpt_oss": {"moe_intermediate_size": None},
    "gpt2": {"intermediate_size": None},
    "gpt_bigcode": {"intermediate_size": None},
}
"""Settings that the tiny model has in common with others and ignores, where the estimate would read them."""

TINY: dict[str, dict[str, Any]] = {
    **{name: {**_SIZES, **settings, **UNUSED.get(name, {})} for name, settings in ARCHITECTURES.items()},
    **{name: {**_SIZES, "num_hidden_layers": 4, "model_type": name, **own} for name, own in HYBRIDS.items()},
}


@slow_unless_changed(*SPECS)
@each_of("name", TINY)
def test_tiny_models_have_the_parameters_of_transformers(name: str) -> None:
    """Within 2 %: in a model 64 wide, biases and vectors are that many."""
    model = build({key: value for key, value in TINY[name].items() if value is not None or key == "pad_token_id"})
    saved = {**model.config.to_dict(), **UNUSED.get(name, {})}
    assert estimate(saved).num_parameters == pytest.approx(size(model), rel=0.02)


# -- what a layer has

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QUERY_AND_OUTPUT = 2 * 512 * 512
KEY_AND_VALUE = 2 * 512 * 128
MLP = 3 * 512 * 1024
MATRICES = 4 * (QUERY_AND_OUTPUT + KEY_AND_VALUE + MLP)
PLAIN = 2 * (2 * 1000 * 512 + 4 * 2 * 512)
"""Bytes of embedding, head and norms, which no quantisation touches."""

MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8}
ATTENTION = 4 * (QUERY_AND_OUTPUT + KEY_AND_VALUE)
EXPERTS = 4 * 8 * MLP
ROUTERS = 2 * 4 * 8 * 512


DELTA_AND_MORE = {**_DELTA, "linear_conv_kernel_dim": 4, "conv_L_cache": 3, "mamba_d_conv": 4, "mamba_expand": 2}
NO_DELTA = {"linear_num_value_heads": None, "conv_L_cache": None}
KDA = {"kda_layers": [1, 3, 4], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}


@pytest.mark.parametrize(
    ("settings", "mixers"),
    [
        ({}, "attention attention attention attention"),
        ({"linear_attn_config": KDA}, "delta attention delta delta"),
        ({"full_attention_interval": 4}, "delta delta delta attention"),
        ({"full_attn_idxs": [0, 2], "linear_num_value_heads": None}, "attention conv attention conv"),
        ({**_MAMBA2, **NO_DELTA, "mamba_n_groups": 1, "attn_layer_indices": [1]}, "mamba attention mamba mamba"),
        (
            {**NO_DELTA, "mamba_d_state": 16, "attn_layer_period": 3, "attn_layer_offset": 1},
            "mamba attention mamba mamba",
        ),
        ({"model_type": "minimax_m1", "attn_type_list": [0, 0, 0, 1]}, "attention attention attention attention"),
    ],
)
def test_rules_and_lists_of_layers_are_read(settings: dict[str, Any], mixers: str) -> None:
    weights = estimate({**LLAMA, **({} if "model_type" in settings else DELTA_AND_MORE), **settings})
    assert [layer[0].module for layer in weights.layers] == mixers.split()


def test_an_architecture_search_sizes_each_layer() -> None:
    attention = {"n_heads_in_group": 4, "no_op": False}
    blocks = [
        {"attention": attention, "ffn": {"ffn_mult": 3.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": attention, "ffn": {"no_op": True}},
        {"attention": {"no_op": True}, "ffn": {"no_op": True}},
    ]
    settings = {**LLAMA, "block_configs": blocks, "intermediate_size": None, "num_key_value_heads": None}
    mixing = QUERY_AND_OUTPUT + KEY_AND_VALUE
    sizes = [total(layer) for layer in estimate(settings).layers]
    assert sizes == [mixing + MLP + 2 * 512, 3 * 512 * 512 + 512, mixing + 512, 0]


# -- bytes


def modelopt(**group: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group}}


FOUR_BIT_FLOAT = {"num_bits": 4, "type": "float", "group_size": 16}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({}, 16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / (128 * 128)),
        ({"quant_method": "fp8", "weight_block_size": None}, 8),
        (modelopt(targets=["Linear"], weights=FOUR_BIT_FLOAT), 4 + 8 / 16),
        ({"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}, 4 + 8 / 16),
        ({"quant_method": "mxfp4"}, 4 + 8 / 32),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + (16 + 4) / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + (16 + 4) / 128),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4 + 32 / 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True},
                    }
                },
            },
            4 + 16 / 128,
        ),
    ],
)
def test_quantised_matrices_take_their_bits_and_their_scales(quantization: dict[str, Any], bits: float) -> None:
    weights = estimate({**LLAMA, "quantization_config": quantization})
    assert weights.bytes_on_rank() == pytest.approx(PLAIN + MATRICES * bits / 8, abs=32)


@pytest.mark.parametrize(
    "kept",
    [
        ["lm_head", *(f"model.layers.{index}.self_attn*" for index in range(4))],
        ["re:.*self_attn.*", "lm_head"],
        ["*.self_attn.*"],
        ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        [f"model.language_model.layers.{index}.self_attn.{matrix}_proj" for index in range(4) for matrix in "qkvo"],
    ],
)
def test_modules_that_a_quantisation_leaves_out_stay_in_the_model_dtype(kept: list[str]) -> None:
    quantization = {**modelopt(targets=["Linear"], weights=FOUR_BIT_FLOAT), "ignore": kept}
    weights = estimate({**MIXTRAL, "quantization_config": quantization})
    assert weights.bytes_on_rank() == PLAIN + ROUTERS + 2 * ATTENTION + EXPERTS * 9 // 16


def test_single_layers_can_be_left_out() -> None:
    quantization = {**modelopt(targets=["Linear"], weights=FOUR_BIT_FLOAT), "ignore": ["model.layers.1*"]}
    weights = estimate({**LLAMA, "quantization_config": quantization})
    bits = [{part.bits for part in layer if part.module != "norm"} for layer in weights.layers]
    assert bits == [{4.5}, {16}, {4.5}, {4.5}]


def test_targets_choose_among_the_schemes() -> None:
    block = {"num_bits": 8, "type": "float", "block_structure": [128, 128], "group_size": None}
    groups = {
        "a": {"targets": ["re:.*self_attn.*"], "weights": block},
        "b": {"targets": ["re:.*experts.*(gate|up|down)_proj$"], "weights": FOUR_BIT_FLOAT},
    }
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    weights = estimate({**MIXTRAL, "quantization_config": quantization})
    assert weights.bytes_on_rank() == PLAIN + ROUTERS + ATTENTION + 4 * ATTENTION // 128**2 + EXPERTS * 9 // 16


def test_layers_can_name_their_own_algorithm() -> None:
    layers = {f"layers.{index}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for index in range(4)}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    weights = estimate({**MIXTRAL, "quantization_config": quantization})
    assert weights.bytes_on_rank() == PLAIN + ROUTERS + 2 * ATTENTION + EXPERTS * 9 // 16


def test_experts_of_four_bits_beside_fp8() -> None:
    settings = {**MIXTRAL, "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}
    assert estimate(settings).bytes_on_rank() == PLAIN + ROUTERS + ATTENTION + EXPERTS * 17 // 32


@needs_configs
@pytest.mark.parametrize(
    ("name", "module", "bits"),
    [
        ("nvidia__GLM-5.1-NVFP4", "experts", {4.5}),
        ("nvidia__GLM-5.1-NVFP4", "attention", {16}),
        ("nvidia__GLM-5.1-NVFP4", "shared", {16}),
        ("nvidia__GLM-5.1-NVFP4", "mlp", {16, 4.5}),
        ("nvidia__Gemma-4-26B-A4B-NVFP4", "experts_beside", {4.5}),
        ("nvidia__Gemma-4-26B-A4B-NVFP4", "mlp", {16}),
        ("nvidia__Qwen3.5-397B-A17B-NVFP4", "delta", {16}),
        ("nvidia__DeepSeek-V4-Flash-NVFP4", "experts", {4.5}),
        ("nvidia__DeepSeek-V4-Flash-NVFP4", "shared", {8 + 2**-9}),
        ("deepseek-ai__DeepSeek-V4-Flash", "experts", {4.25}),
        ("RedHatAI__DeepSeek-V4-Flash-NVFP4-FP8", "shared", {4.5}),
        ("RedHatAI__DeepSeek-V4-Flash-NVFP4-FP8", "attention_down", {8 + 2**-9}),
        ("RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "attention", {16}),
        ("RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "experts", {8}),
        ("moonshotai__Kimi-K3", "experts", {4.25}),
        ("moonshotai__Kimi-K3", "delta", {16}),
        ("zai-org__GLM-5.2-FP8", "router", {16}),
    ],
)
def test_real_quantisations_are_read(name: str, module: str, bits: set[float]) -> None:
    layers = estimate(real(name)).layers
    assert {part.bits for layer in layers for part in layer if part.module == module} <= bits
    assert any(part.module == module for layer in layers for part in layer)


def test_the_dtype_is_the_configurations_or_the_callers() -> None:
    half = estimate(LLAMA)
    assert half.bytes_on_rank() == 2 * half.num_parameters
    assert estimate({k: v for k, v in LLAMA.items() if k != "torch_dtype"}) == half
    assert estimate(LLAMA, DType.FLOAT32).bytes_on_rank() == 4 * half.num_parameters


# -- ranks and stages


def test_tensor_parallelism_divides_matrices_and_copies_the_rest() -> None:
    weights = estimate(LLAMA)
    norms = 2 * 4 * 2 * 512
    for tp in (1, 2):
        assert tp * weights.bytes_on_rank(tp) == weights.bytes_on_rank() + (tp - 1) * norms
    # Two KV heads on eight ranks: four copies of each.
    copies = 3 * 2 * 4 * KEY_AND_VALUE
    assert 8 * weights.bytes_on_rank(8) == weights.bytes_on_rank() + 7 * norms + copies


def test_down_projections_of_latent_attention_are_whole_on_every_rank() -> None:
    settings = {**LLAMA, **_LATENT, "index_n_heads": None, "n_routed_experts": None, "model_type": "deepseek_v3"}
    weights = estimate(settings)
    whole = 4 * (512 * (24 + 16 + 8) + 2 * 512)
    assert 4 * weights.bytes_on_rank(4) == weights.bytes_on_rank() + 3 * 2 * whole


@pytest.mark.parametrize("tied", [False, True])
def test_stages_add_up_to_the_model(tied: bool) -> None:
    weights = estimate({**LLAMA, "tie_word_embeddings": tied})
    stages = [weights.bytes_on_rank(1, range(first, last)) for first, last in ((0, 1), (1, 3), (3, 4))]
    copy = 2 * weights.embedding if tied else 0  # the last stage needs the embedding as its head
    assert sum(stages) == weights.bytes_on_rank() + copy
    assert weights.head == (0 if tied else weights.embedding)


def test_towers_are_on_the_first_stage_and_whole() -> None:
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "patch_size": 14}
    weights = estimate({"text_config": LLAMA, "vision_config": vision})
    assert weights.other == 2 * (4 * 64 * 64 + 2 * 64 * 128) + 3 * 14 * 14 * 64 + 64 * 512
    bare = estimate(LLAMA)
    assert weights.bytes_on_rank(2, range(2)) == bare.bytes_on_rank(2, range(2)) + 2 * weights.other
    assert weights.bytes_on_rank(2, range(2, 4)) == bare.bytes_on_rank(2, range(2, 4))


def test_a_tower_that_is_not_described_is_not_counted() -> None:
    vision = {"patch_size": 14, "num_position_embeddings": 256, "hidden_size": 64}
    assert estimate({"text_config": LLAMA, "vision_config": vision}).other == 0


def test_draft_layers_count_only_where_asked_for() -> None:
    weights = estimate({**LLAMA, "num_nextn_predict_layers": 2})
    (layer, other) = weights.draft_layers
    assert layer == other
    assert total(layer) == MATRICES // 4 + 2 * 512 * 512 + 3 * 512
    assert weights.bytes_on_rank() == estimate(LLAMA).bytes_on_rank()
    assert weights.bytes_on_rank(draft=True) == weights.bytes_on_rank() + 4 * total(layer)
    assert weights.bytes_on_rank(1, range(2), draft=True) == weights.bytes_on_rank(1, range(2))


@needs_configs
@pytest.mark.parametrize(
    ("name", "number", "parameters"),
    [("deepseek-ai__DeepSeek-R1", 1, 11.6e9), ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 0, 0)],
)
def test_draft_layers_of_real_models(name: str, number: int, parameters: float) -> None:
    layers = estimate(real(name)).draft_layers
    assert len(layers) == number
    assert sum(map(total, layers)) == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("stage", [range(0), range(2, 5), range(0, 4, 2)])
def test_a_stage_is_a_run_of_layers(stage: range) -> None:
    with pytest.raises(ValueError, match="a run of the 4 layers"):
        estimate(LLAMA).bytes_on_rank(1, stage)


def test_there_is_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="tp is 1 or more"):
        estimate(LLAMA).bytes_on_rank(0)


# -- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"intermediate_size": None}, "'intermediate_size'"),
        ({"intermediate_size": [96] * 4}, "sizes single layers differently"),
        ({"moe_intermediate_size": [96] * 4, "num_experts": 4}, "sizes single layers differently"),
        ({"num_experts": [4] * 4}, "sizes single layers differently"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["retention"]}, "kind 'retention'"),
        ({"layer_types": ["linear_attention"] * 4}, "no 'mamba_num_heads'"),
        ({"hybrid_override_pattern": "M*X-"}, "kind 'X'"),
        ({"hybrid_override_pattern": "***"}, "names 3 layers of 4"),
        ({"num_experts": 4, "moe_layer_freq": [1]}, "names 1 layers and has more"),
        ({"mamba_n_heads": 8}, "no 'layer_types'"),
        ({"hidden_size_per_layer_input": 256}, "once more per layer"),
        ({"H_cycles": 2}, "runs its layers several times"),
        ({"n_mamba_heads": 2}, "shares one attention among layers"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"block_configs": [{"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}}] * 4}, "'ffn_mult'"),
        ({"quantization_config": {"quant_method": "torchao"}}, "quantised by 'TORCHAO'"),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, "quantised by ''"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        estimate({**LLAMA, **settings})
