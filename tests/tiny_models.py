"""Tiny random models of many architectures, small enough to load and run in a test.

Weights are drawn wide, so that logits spread, greedy tokens vary and a mistake in attention shows. The seed is fixed:
the same name gives the same model everywhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

VOCAB_SIZE = 256
CONTEXT_LENGTH = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": 0,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 4},
    "llama_gqa": {"model_type": "llama"},
    "llama_mqa": {"model_type": "llama", "num_key_value_heads": 1},
    "llama_yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10000.0,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2_sliding": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen2_moe": {"model_type": "qwen2_moe", **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    "qwen3_moe": {"model_type": "qwen3_moe", **_EXPERTS, "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "mixtral": {"model_type": "mixtral", **_EXPERTS, "sliding_window": None},
    "phi": {"model_type": "phi"},
    "phi3": {"model_type": "phi3", "sliding_window": 11},
    "phi3_longrope": {
        "model_type": "phi3",
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.5 * i for i in range(8)],
            "original_max_position_embeddings": 24,
        },
        "original_max_position_embeddings": 24,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": 8, "layer_types": _SLIDING},
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
    },
    "glm4": {"model_type": "glm4", "head_dim": 16},
    "cohere": {"model_type": "cohere", "logit_scale": 0.5},
    "cohere2": {"model_type": "cohere2", "logit_scale": 0.5, "sliding_window": 8, "layer_types": _SLIDING},
    "gpt2": {
        "model_type": "gpt2",
        "num_key_value_heads": None,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": CONTEXT_LENGTH,
    },
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": None, "rotary_pct": 0.5},
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "tie_word_embeddings": False,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": CONTEXT_LENGTH,
    },
    "opt": {
        "model_type": "opt",
        "num_key_value_heads": None,
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "dropout": 0.0,
        "pad_token_id": 1,
    },
    "gemma": {"model_type": "gemma", "head_dim": 24},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 8,
        "attn_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": _SLIDING,
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {"model_type": "gpt_oss", **_EXPERTS, "head_dim": 16, "sliding_window": 8, "layer_types": _SLIDING},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 10},
    "stablelm": {"model_type": "stablelm", "partial_rotary_factor": 0.5},
    "smollm3": {"model_type": "smollm3"},
    "exaone4": {"model_type": "exaone4", "sliding_window": 8, "layer_types": _SLIDING},
    "nemotron": {"model_type": "nemotron", "head_dim": 16},
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash",
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
        "v_head_dim": 12,
        "swa_head_dim": 16,
        "swa_v_head_dim": 12,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "sliding_window": 8,
        "layer_types": _SLIDING,
    },
    "diffllama": {"model_type": "diffllama"},
    "deepseek_v2": {"model_type": "deepseek_v2", **_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENT},
}
"""Name of a tiny model to what its configuration has beyond the common sizes."""


def build_tiny(architecture: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A transformers causal language model in float32, random, in evaluation mode."""
    settings = {**_SIZES, **ARCHITECTURES[architecture], **overrides}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    finally:
        transformers_logging.set_verbosity(verbosity)
    draw_weights(model, seed)
    return model.eval()


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Give a model the wide random weights of its seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name or "wte" in name:
                parameter.copy_(noise)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * (1.5 / math.sqrt(parameter.shape[-1])))
            elif "sink" in name:
                parameter.copy_(noise + 1.0)
            else:
                parameter.add_(noise * 0.1)


def save_tiny(architecture: str, folder: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write the model's config.json and model.safetensors into `folder` and return it."""
    folder = Path(folder)
    transformers_logging.disable_progress_bar()
    try:
        build_tiny(architecture, seed=seed, **overrides).save_pretrained(folder)
    finally:
        transformers_logging.enable_progress_bar()
    return folder
