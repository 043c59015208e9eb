"""Tiny models with latent attention, dense and sparse. Indexers have several heads, so that keys seldom score alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_hybrids import HYBRIDS
from tests.tiny_models import build_tiny, save_tiny

_LATENT: dict[str, Any] = HYBRIDS["deepseek_v3"]
_INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 64, "index_n_heads": 8}
_SHARED_INDEXERS: dict[str, Any] = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}

LATENTS: Mapping[str, dict[str, Any]] = {
    "deepseek_v2": HYBRIDS["deepseek_v2"],
    "deepseek_v3": _LATENT,
    "deepseek_v3_yarn": {
        **_LATENT,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4_moe_lite": {**_LATENT, "model_type": "glm4_moe_lite"},
    "minicpm3": {**_LATENT, "model_type": "minicpm3", "dim_model_base": 8},
    "axk1": {**_LATENT, "model_type": "axk1"},
    "youtu": {**_LATENT, "model_type": "youtu"},
    "longcat_flash": {
        **_LATENT,
        "model_type": "longcat_flash",
        "num_layers": 3,
        "head_dim": 32,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "deepseek_v32": {**_LATENT, **_INDEXER, "model_type": "deepseek_v32"},
    "axk2": {**_LATENT, **_INDEXER, "model_type": "axk2"},
    "glm_moe_dsa": {**_LATENT, **_INDEXER, **_SHARED_INDEXERS, "model_type": "glm_moe_dsa"},
    "hy_v4": {**_LATENT, **_INDEXER, **_SHARED_INDEXERS, "model_type": "hy_v4"},
}
"""Name of a tiny model to what its configuration has beyond the common sizes."""

SPARSE = tuple(name for name, settings in LATENTS.items() if "index_topk" in settings)


def build_latent(name: str, **overrides: Any) -> Any:
    """A transformers causal language model of the table, in float32, random, in evaluation mode."""
    return build_tiny("llama_gqa", **{**LATENTS[name], **overrides})


def save_latent(name: str, folder: str | Path, **overrides: Any) -> str:
    """Write that model's config.json and model.safetensors into `folder` and return it."""
    return str(save_tiny("llama_gqa", folder, **{**LATENTS[name], **overrides}))
