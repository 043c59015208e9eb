"""The editions of the bundled model: one kind of layers each, the same words and the same chat format.

`plain` keeps keys and values of every token. The other two are hybrids, which exist so that pools of several kinds can
be seen at work without a download: `window` has layers that read the last 64 tokens only, `recurrent` has layers that
keep a state of constant size. Both have three such layers, then one of full attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import SPECIAL_TOKENS
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

CONTEXT = 2048  # tokens
_MODELS = Path(__file__).resolve().parent.parent / "src" / "quire" / "models"
_COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
    "bos_token_id": SPECIAL_TOKENS.index("<|bos|>"),
    "eos_token_id": SPECIAL_TOKENS.index("<|end|>"),
}
_SMALL: dict[str, Any] = {**_COMMON, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Edition:
    """One edition: the class of its configuration, the sizes, and the folder of the package that ships it."""

    folder: Path
    family: Callable[..., PreTrainedConfig]
    sizes: dict[str, Any]

    def new_model(self, vocab_size: int) -> PreTrainedModel:
        """The model, with fresh weights."""
        model: PreTrainedModel = AutoModelForCausalLM.from_config(self.family(vocab_size=vocab_size, **self.sizes))
        with torch.no_grad():  # the branches start at zero, so that each block starts as the identity
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    weight.zero_()
        return model


EDITIONS = {
    "plain": Edition(
        _MODELS / "bundled",
        LlamaConfig,
        {**_COMMON, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "window": Edition(
        _MODELS / "bundled_window",
        Gemma3TextConfig,
        {
            **_SMALL,
            "intermediate_size": 512,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "sliding_window_pattern": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "recurrent": Edition(
        _MODELS / "bundled_recurrent",
        Qwen3_5TextConfig,
        {
            **_SMALL,
            "intermediate_size": 448,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    ),
}
