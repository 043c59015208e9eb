"""Random EAGLE heads in their public layouts, and what they compute, in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HEADS, KV_HEADS, DIM, WIDE = 4, 2, 8, 64
EPS = 1e-5


def head_settings(hidden: int, **more: Any) -> dict[str, Any]:
    """The contents of a config.json. The number of layers is that of the target, as in a public one."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": WIDE,
        "num_hidden_layers": 36,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "vocab_size": 256,
        **more,
    }


def head_tensors(hidden: int, *, states: int = 0, draft_vocab: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Random weights: those of EAGLE-3 if it reads several `states`, else of EAGLE, in the layout `midlayer.*`."""
    generator = torch.Generator().manual_seed(seed)
    read = 2 * hidden if states else hidden
    shapes = {
        "fc.weight": (hidden, (states or 2) * hidden),
        "midlayer.self_attn.q_proj.weight": (HEADS * DIM, read),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * DIM, read),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * DIM, read),
        "midlayer.self_attn.o_proj.weight": (hidden, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": (WIDE, hidden),
        "midlayer.mlp.up_proj.weight": (WIDE, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, WIDE),
        "midlayer.post_attention_layernorm.weight": (hidden,),
    }
    if states:
        norms = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight")
        shapes |= dict.fromkeys(norms, (hidden,)) | {"lm_head.weight": (draft_vocab, hidden)}
    found = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    found |= {name: 1 + tensor for name, tensor in found.items() if tensor.ndim == 1}
    if states:
        targets = torch.arange(draft_vocab) * 2 + 1  # every other token of the target
        found |= {"d2t": targets - torch.arange(draft_vocab), "t2d": torch.zeros(256, dtype=torch.bool)}
    return found


def save_head(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor], *, prefix: str = "midlayer.") -> Path:
    """Write a head with the names of its layer's tensors after `prefix`."""
    folder.mkdir(parents=True, exist_ok=True)
    renamed = {name.replace("midlayer.", prefix): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def dense_head(weights: dict[str, Tensor], embeddings: Tensor, features: Tensor) -> Tensor:
    """Features of the next positions, `[T, hidden]`, of one sequence from its beginning."""
    w = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor for name, tensor in weights.items()}
    length = len(features)
    if "hidden_norm" in w:
        residual = features
        read = torch.cat((_norm(embeddings, w["input_layernorm"]), _norm(features, w["hidden_norm"])), -1)
    else:
        residual = read = torch.cat((embeddings, features), -1) @ w["fc"].T
    angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
    query, key, value = ((read @ w[f"self_attn.{name}_proj"].T).view(length, -1, DIM) for name in "qkv")
    query, key = _rotated(query, angles), _rotated(key, angles)
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
    shares = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", shares, value).reshape(length, -1)
    attended = residual + mixed @ w["self_attn.o_proj"].T
    rows = _norm(attended, w["post_attention_layernorm"])
    gated = torch.nn.functional.silu(rows @ w["mlp.gate_proj"].T) * (rows @ w["mlp.up_proj"].T)
    return attended + gated @ w["mlp.down_proj"].T


def dense_choice(weights: dict[str, Tensor], features: Tensor, output_layer: Tensor) -> Tensor:
    """The target's id of the likeliest token, of each row of features."""
    if "norm.weight" not in weights:
        return (features @ output_layer.T).argmax(-1)
    drafts = (_norm(features, weights["norm.weight"]) @ weights["lm_head.weight"].T).argmax(-1)
    return drafts + weights["d2t"][drafts]


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return weight * rows * (rows.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()


def _rotated(rows: Tensor, angles: Tensor) -> Tensor:
    cos, sin = (function(torch.cat((angles, angles), -1))[:, None] for function in (torch.cos, torch.sin))
    low, high = rows.chunk(2, -1)
    return rows * cos + torch.cat((-high, low), -1) * sin
