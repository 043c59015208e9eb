"""The editions of the bundled model: the layers, the words and the lengths of each.

`plain` keeps keys and values of every token. The other two are hybrids, which exist so that pools of several kinds can
be seen at work without a download: `window` has layers that read the last 64 tokens only, `recurrent` has layers that
keep a state of constant size. Both have three such layers, then one of full attention. These three have the same words
and the same chat format. `agent` has the layers of `window`, with a window of 128 tokens; its words are those of prose,
code and JSON, its chat format has tools, and its context is long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blocks
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
AGENT_CONTEXT = 65536
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] | trim }}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_ROWS = {256: 0.68, 512: 0.17, 1024: 0.10, 2048: 0.05}
_MODELS = Path(__file__).resolve().parent.parent / "src" / "quire" / "models"
_COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
    "bos_token_id": SPECIAL_TOKENS.index("<|bos|>"),
    "eos_token_id": SPECIAL_TOKENS.index("<|end|>"),
}
_SMALL: dict[str, Any] = {**_COMMON, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}
_WINDOW: dict[str, Any] = {
    **_SMALL,
    "intermediate_size": 512,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "sliding_window_pattern": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}


@dataclass(frozen=True)
class Edition:
    """One edition: the class of its configuration, the sizes, and the folder of the package that ships it. `rows` has
    the lengths of rows, in tokens, and their shares of the steps. `attention` is the implementation that trains it."""

    folder: Path
    family: Callable[..., PreTrainedConfig]
    sizes: dict[str, Any]
    rows: Mapping[int, float]
    attention: str = "sdpa"
    begins_as: str | None = None  # the trained edition whose blocks it begins with

    @property
    def template(self) -> str:
        """The chat template; of an edition with one of its own, a file in the folder."""
        path = self.folder / "chat_template.jinja"
        return path.read_text(encoding="utf-8") if path.exists() else CHAT_TEMPLATE

    def new_model(self) -> PreTrainedModel:
        """The model, with fresh weights."""
        config = self.family(**self.sizes)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=self.attention)
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
        _ROWS,
    ),
    "window": Edition(_MODELS / "bundled_window", Gemma3TextConfig, _WINDOW, _ROWS),
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
        _ROWS,
    ),
    "agent": Edition(
        _MODELS / "bundled_agent",
        Gemma3TextConfig,
        {**_WINDOW, "sliding_window": 128, "max_position_embeddings": AGENT_CONTEXT, "vocab_size": 4096},
        {512: 0.8, 2048: 0.144, 8192: 0.05, 32768: 0.006},
        attention=blocks.NAME,
        begins_as="window",
    ),
}
