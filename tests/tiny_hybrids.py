"""Tiny models of the families whose layers keep more than keys and values of every token.

Windows, chunks, shared layers, latents, indexers, recurrent states and compressed latents. Fields are spelled as the
families' published configurations spell them. Widths are multiples of 32, so that every KV format fits, and sizes that
could be taken for one another differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.tiny_models import _SIZES, ARCHITECTURES, build_tiny

_EXPERTS: dict[str, Any] = {
    name: value for name, value in ARCHITECTURES["qwen3_moe"].items() if name not in ("model_type", "head_dim")
}
_LATENT: dict[str, Any] = {
    **ARCHITECTURES["deepseek_v3"],
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
}
_INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 64, "index_n_heads": 2}
_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA: dict[str, Any] = {"mamba_d_state": 12, "mamba_d_conv": 4, "mamba_expand": 2}
_MAMBA_2: dict[str, Any] = {
    **_MAMBA,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
}
_HEADS_OF_32: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
"""For configurations without `head_dim`, whose heads share the 64 hidden numbers."""
_NO_ATTENTION: dict[str, Any] = {
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "max_position_embeddings": None,
}
"""Fields that configurations of models without attention do not have."""
_LAYERS_OF_6 = ["sliding_attention", "sliding_attention", "full_attention"] * 2

HYBRIDS: Mapping[str, dict[str, Any]] = {
    "mistral_all_slide": {**ARCHITECTURES["mistral"], "head_dim": 32},
    "gemma2": {**ARCHITECTURES["gemma2"], "head_dim": 32},
    "gemma3_text": {**ARCHITECTURES["gemma3_text"], "head_dim": 32, "num_hidden_layers": 6, "layer_types": None},
    "gemma3n_text": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "head_dim": 32,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "sliding_window": 8,
        "layer_types": _LAYERS_OF_6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _SIZES["vocab_size"],
    },
    "gemma4_text": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,  # transformers numbers the layers of more than ten with leading zeros
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,  # without effect where `attention_k_eq_v` is off
        "attention_k_eq_v": False,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _SIZES["vocab_size"],
    },
    "gemma4_text_shared": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 8,
        "layer_types": _LAYERS_OF_6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _SIZES["vocab_size"],
    },
    "gpt_oss": {**ARCHITECTURES["gpt_oss"], "head_dim": 32, "num_hidden_layers": 4, "layer_types": None},
    "cohere2": {**ARCHITECTURES["cohere2"], "head_dim": 32, "num_hidden_layers": 4, "layer_types": None},
    "mimo_v2_flash": {
        **ARCHITECTURES["mimo_v2_flash"],
        "num_hidden_layers": 6,
        "head_dim": 64,
        "v_head_dim": 32,
        "swa_head_dim": 64,
        "swa_v_head_dim": 32,
        "sliding_window": 8,
        "sliding_window_size": 8,
        "attention_chunk_size": 8,
        "layer_types": None,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
    },
    "mimo_v2_flash_without_swa": {
        **{name: value for name, value in ARCHITECTURES["mimo_v2_flash"].items() if not name.startswith("swa_")},
        "head_dim": 64,
        "v_head_dim": 32,
    },
    "llama4_text": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "attention_chunk_size": 8,
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
    },
    "deepseek_v2": {**ARCHITECTURES["deepseek_v2"], **_LATENT, "model_type": "deepseek_v2"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, **_INDEXER, "model_type": "deepseek_v32"},
    "glm_moe_dsa": {
        **_LATENT,
        **_INDEXER,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "glm_moe_dsa_by_period": {
        **_LATENT,
        **_INDEXER,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 6,
        "index_topk_freq": 2,
    },
    "glm_moe_dsa_by_pattern": {
        **_LATENT,
        **_INDEXER,
        "model_type": "glm_moe_dsa",
        "index_topk_pattern": "FSF",
    },
    "minimax_m3": {
        "model_type": "minimax_m3_vl_text",
        **_EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "rotary_dim": 16,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 0, 1],
            "sparse_index_dim": 16,
            "sparse_num_index_heads": 2,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 2,
            "sparse_local_block": 1,
        },
    },
    "deepseek_v4": {
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 8,
        "compress_ratios": [0, 128, 4],
        "index_n_heads": 2,
        "index_head_dim": 64,
        "index_topk": 4,
        "hc_mult": 2,
    },
    "qwen3_next": {"model_type": "qwen3_next", **_EXPERTS, **_DELTA_NET, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {"model_type": "qwen3_5_text", **_DELTA_NET},
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        **_EXPERTS,
        **_DELTA_NET,
        "shared_expert_intermediate_size": 32,
    },
    "mamba": {"model_type": "mamba", **_NO_ATTENTION, "state_size": 12, "conv_kernel": 4, "expand": 2},
    "falcon_mamba": {"model_type": "falcon_mamba", **_NO_ATTENTION, "state_size": 12, "conv_kernel": 4, "expand": 2},
    "mamba2": {
        "model_type": "mamba2",
        **_NO_ATTENTION,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 12,
        "conv_kernel": 4,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 8,
    },
    "jamba": {
        "model_type": "jamba",
        **_MAMBA,
        **_HEADS_OF_32,
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "use_mamba_kernels": False,
    },
    "zamba": {
        "model_type": "zamba",
        **_MAMBA,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
    },
    "bamba": {"model_type": "bamba", **_MAMBA_2, **_HEADS_OF_32, "attn_layer_indices": [1]},
    "falcon_h1": {"model_type": "falcon_h1", **_MAMBA_2, "mamba_d_ssm": 96, "mamba_n_heads": 6, "head_dim": 32},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **_MAMBA_2,
        **_HEADS_OF_32,
        "num_local_experts": 2,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "ME*-M",
        "head_dim": 32,
        "ssm_state_size": 12,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "zamba2": {
        "model_type": "zamba2",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 8,
    },
    "lfm2": {
        "model_type": "lfm2",
        **_HEADS_OF_32,
        "full_attn_idxs": [1],
        "conv_L_cache": 3,
        "block_multiple_of": 8,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        **_HEADS_OF_32,
        **_EXPERTS,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
    },
    "lfm3": {
        "model_type": "lfm3",
        "num_hidden_layers": 5,
        "head_dim": 32,
        "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention"],
        "sliding_window": 8,
        "conv_L_cache": 5,
    },
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        **_HEADS_OF_32,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "bailing_hybrid": {
        **_LATENT,
        "model_type": "bailing_hybrid",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "layer_group_size": 2,
    },
    "kimi_linear": {
        **_LATENT,
        "model_type": "kimi_linear",
        "q_lora_rank": None,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "minimax": {
        "model_type": "minimax",
        **_EXPERTS,
        "head_dim": 32,
        "block_size": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "recurrent_gemma": {
        "model_type": "recurrent_gemma",
        **_HEADS_OF_32,
        "num_key_value_heads": 1,
        "max_position_embeddings": None,
        "num_hidden_layers": 4,
        "block_types": ["recurrent", "recurrent", "attention"],
        "lru_width": 96,
        "attention_window_size": 8,
    },
}
"""Name of a tiny model to what its configuration has beyond the common sizes."""

WINDOWED = (
    "mistral_all_slide",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_text_shared",
    "gpt_oss",
    "cohere2",
    "mimo_v2_flash",
    "llama4_text",
)
"""Those with windows or chunks, which have a group of their own."""


WITH_STATES = (
    "mamba2",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "granitemoehybrid",
    "zamba2",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "kimi_linear",
    "bailing_hybrid",
    "jamba",
    "mamba",
    "falcon_mamba",
    "zamba",
    "minimax",
    "recurrent_gemma",
)
"""Those with recurrent layers."""


def published(name: str) -> dict[str, Any]:
    """The configuration of a model of either table, spelled as a published one is; null: the field is absent."""
    return {**_SIZES, **(HYBRIDS.get(name) or ARCHITECTURES[name])}


def build_hybrid(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A transformers causal language model of either table, in float32, random, in evaluation mode."""
    if name not in HYBRIDS:
        return build_tiny(name, seed=seed, **overrides)
    # Overrides replace every field that the named architecture sets, its type included.
    return build_tiny("llama_gqa", seed=seed, **{**HYBRIDS[name], **overrides})
