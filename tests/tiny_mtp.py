"""Tiny models with a prediction layer (multi-token prediction), and checkpoints that have its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel
from transformers.utils import logging as transformers_logging

from tests.tiny_hybrids import HYBRIDS
from tests.tiny_models import build_tiny, draw_weights

_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 32,
}

PREDICTING: Mapping[str, dict[str, Any]] = {
    "deepseek_v3": HYBRIDS["deepseek_v3"],
    "glm4_moe": {**_EXPERTS, "model_type": "glm4_moe", "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "mellum": {
        **_EXPERTS,
        "model_type": "mellum",
        "num_mtp_layers": 1,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen3_next": HYBRIDS["qwen3_next"],
    "qwen3_5_text": HYBRIDS["qwen3_5_text"],
}
"""Name of a tiny model to its configuration beyond the common sizes. The layer of Mellum has a window."""

_AS_STORED = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
_EXPERT_NAMES = ("gate_proj", "up_proj")


def build_predicting(name: str, *, seed: int = 0, **overrides: Any) -> tuple[Any, MtpModel]:
    """A transformers model and its prediction layer, as transformers computes it, both with random weights."""
    model = build_tiny("llama_gqa", seed=seed, **{**PREDICTING[name], **overrides})
    text = model.config.get_text_config()
    if getattr(text, "num_mtp_layers", None) is None:
        text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    mtp = MtpModel(model, 1)
    with torch.random.fork_rng(devices=[]):
        draw_weights(mtp.layers, seed + 1)
    return model, mtp.eval()


def layer_tensors(name: str, mtp: MtpModel, num_layers: int) -> dict[str, Tensor]:
    """The layer as public checkpoints have it: as one more layer, or as `mtp`."""
    found: dict[str, Tensor] = {}
    for key, tensor in mtp.layers[0].state_dict().items():
        found |= _stored(key, tensor, name in ("deepseek_v3", "glm4_moe"), num_layers)
    return {key: tensor.clone().contiguous() for key, tensor in found.items()}


def _stored(key: str, tensor: Tensor, as_layer: bool, num_layers: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{num_layers}" if as_layer else "mtp"
    part, _, rest = key.partition(".")
    if part != "mtp_block":
        stored = part.replace("post_norm", "shared_head.norm") if as_layer else _AS_STORED[part]
        return {f"{prefix}.{stored}.{rest}": tensor}
    prefix += "" if as_layer else ".layers.0"
    if not rest.startswith("mlp.experts."):
        return {f"{prefix}.{rest}": tensor}
    found: dict[str, Tensor] = {}
    for expert, weight in enumerate(tensor):
        parts = {"down_proj": weight}
        if rest.endswith("gate_up_proj"):
            parts = dict(zip(_EXPERT_NAMES, weight.chunk(2), strict=True))
        found |= {f"{prefix}.mlp.experts.{expert}.{kind}.weight": each for kind, each in parts.items()}
    return found


def save_predicting(
    folder: Path, name: str, model: Any, mtp: MtpModel, changed: Mapping[str, Tensor | None] | None = None
) -> str:
    """Write a checkpoint with the layer. Of `changed`, tensors replace its own, and None removes one."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    transformers_logging.enable_progress_bar()
    path = folder / "model.safetensors"
    tensors = load_file(path) | layer_tensors(name, mtp, model.config.num_hidden_layers) | dict(changed or {})
    save_file({key: each for key, each in tensors.items() if each is not None}, path, metadata={"format": "pt"})
    return str(folder)
