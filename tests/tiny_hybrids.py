"""Tiny random models of the families whose layers keep more than keys and values of everything.

Windows, chunks, shared layers, latents, indexers, recurrent states and compressed latents. Most widths are multiples of
32, so that every KV format fits; sizes that could be mistaken for each other differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tests.tiny_models as plain

CONTEXT_LENGTH = plain.CONTEXT_LENGTH
VOCAB_SIZE = plain.VOCAB_SIZE

_PATTERN = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 64, "index_n_heads": 2}
_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA: dict[str, Any] = {"mamba_d_state": 12, "mamba_d_conv": 4, "mamba_expand": 2}
_MAMBA_2: dict[str, Any] = {**_MAMBA, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2}
_WIDE_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
"""For configurations without `head_dim`: 64 hidden numbers in two heads of 32."""

HYBRIDS: Mapping[str, dict[str, Any]] = {
    "mistral_all_slide": {"model_type": "mistral", "head_dim": 32, "sliding_window": 8},
    "gemma2": {"model_type": "gemma2", "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "head_dim": 32,
        "sliding_window": 8,
        "query_pre_attn_scalar": 32,
    },
    "gemma4_text": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gemma4_text_shared": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gemma3n_text": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 6,
        "head_dim": 32,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 8,
    },
    "cohere2": {
        "model_type": "cohere2",
        "logit_scale": 0.5,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 8,
    },
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash",
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 64,
        "v_head_dim": 32,
        "swa_head_dim": 64,
        "swa_v_head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "sliding_window": 8,
        "layer_types": _PATTERN,
    },
    "llama4_text": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "attention_chunk_size": 8,
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "pad_token_id": 1,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", **_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENT},
    "deepseek_v32": {"model_type": "deepseek_v32", **_LATENT, **_INDEXER},
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **_LATENT,
        **_INDEXER,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "minimax_m3": {
        "model_type": "minimax_m3_vl_text",
        **_EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "rotary_dim": 16,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "deepseek_v4": {
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 128,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "index_n_heads": 2,
        "index_head_dim": 64,
        "index_topk": 4,
        "hc_mult": 2,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_EXPERTS,
        **_DELTA_NET,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **_DELTA_NET},
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        **_EXPERTS,
        **_DELTA_NET,
        "shared_expert_intermediate_size": 32,
    },
    "mamba": {"model_type": "mamba", "state_size": 12, "conv_kernel": 4, "expand": 2},
    "falcon_mamba": {"model_type": "falcon_mamba", "state_size": 12, "conv_kernel": 4, "expand": 2},
    "mamba2": {
        "model_type": "mamba2",
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
        **_WIDE_HEADS,
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "use_mamba_kernels": False,
    },
    "bamba": {"model_type": "bamba", **_MAMBA_2, **_WIDE_HEADS, "attn_layer_indices": [1]},
    "falcon_h1": {
        "model_type": "falcon_h1",
        **_MAMBA_2,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "head_dim": 32,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **_MAMBA_2,
        **_WIDE_HEADS,
        "num_local_experts": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
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
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 8,
    },
    "lfm2": {
        "model_type": "lfm2",
        **_WIDE_HEADS,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "block_multiple_of": 8,
    },
    "kimi_linear": {
        "model_type": "kimi_linear",
        **_LATENT,
        "q_lora_rank": None,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
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
        **_WIDE_HEADS,
        "num_key_value_heads": 1,
        "lru_width": 96,
        "conv1d_width": 4,
        "attention_window_size": 8,
    },
}
"""Name of a tiny model to what its configuration has beyond the sizes common to all tiny models."""


def build_hybrid(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A transformers causal language model in float32, random, in evaluation mode."""
    return plain.build_model({**HYBRIDS[name], **overrides}, seed=seed)
