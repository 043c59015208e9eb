"""EagleHead: one decoder layer that drafts from what a target computed, in the public layouts of EAGLE and EAGLE-3.

position            n                       n + 1
target computes     features f(n)           features f(n + 1)
head is given       f(n), token n + 1       f(n + 1), token n + 2
head predicts       token n + 2, f'(n + 1)  token n + 3, f'(n + 2)

`f'` stands in for features that the target has not computed yet. EAGLE reads the target's last hidden state and uses
its output layer. EAGLE-3 reads hidden states of several layers and has an output layer of its own, often for fewer
tokens. A head holds weights and computes; it stores nothing besides the keys and values of its attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from quire.models.hidden import DraftHead


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What a head reads. `num_features` hidden states of the target per token, each of `target_hidden` numbers."""

    target_hidden: int
    num_features: int = 1
    draft_vocab: int = 0
    """Tokens that the head's own output layer has. 0: it uses the target's."""
    bias: bool = False  # the fusion's
    norm_before_residual: bool = False

    @property
    def is_eagle3(self) -> bool:
        """Whether features are hidden states of several layers, and the output layer is the head's."""
        return self.draft_vocab > 0


class _EagleBlock(LlamaDecoderLayer):  # type: ignore[misc]
    """A Llama layer whose input is not normalised."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        self.input_layernorm = nn.Identity()


class _Eagle3Block(nn.Module):
    """A Llama layer whose attention reads embeddings and features side by side."""

    def __init__(self, config: LlamaConfig, shape: HeadShape) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = shape.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * hidden, narrow.out_features, narrow.bias is not None))
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)
        self.mlp = LlamaMLP(config)

    def forward(self, embeddings: Tensor, features: Tensor, **others: Any) -> Tensor:
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        attended, _ = self.self_attn(torch.cat((self.input_layernorm(embeddings), normed), -1), **others)
        attended = residual + attended
        out: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out


class EagleHead(DraftHead):
    """See the module. Its methods are those of `DraftHead`."""

    def __init__(self, config: LlamaConfig, shape: HeadShape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        hidden = config.hidden_size
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if shape.is_eagle3:
            self.fc = nn.Linear(shape.num_features * shape.target_hidden, hidden, shape.bias)
            self.midlayer = _Eagle3Block(config, shape)
            self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
            self.lm_head = nn.Linear(hidden, shape.draft_vocab, bias=False)
            self.d2t = nn.Buffer(torch.zeros(shape.draft_vocab, dtype=torch.int64))
        else:
            self.fc = nn.Linear(2 * hidden, hidden, shape.bias)
            self.midlayer = _EagleBlock(config)

    def features(self, captured: Tensor) -> Tensor:
        """See `DraftHead`; `captured` is `[..., num_features * target_hidden]`."""
        fused: Tensor = self.fc(captured) if self.shape.is_eagle3 else captured
        return fused

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        others = {"position_embeddings": self.rotary_emb(features, positions)}
        if self.shape.is_eagle3:
            out: Tensor = self.midlayer(embeddings, features, **others)
        else:
            out = self.midlayer(self.fc(torch.cat((embeddings, features), -1)), **others)
        return out

    def logits(self, features: Tensor, target_head: nn.Module) -> Tensor:
        out: Tensor = self.lm_head(self.norm(features)) if self.shape.is_eagle3 else target_head(features)
        return out

    def target_ids(self) -> Tensor | None:
        if not self.shape.is_eagle3:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


def head_config(given: Mapping[str, Any], attention: str) -> LlamaConfig:
    """The configuration of a head's layer, from the contents of its config.json."""
    own = ("model_type", "architectures", "auto_map", "num_hidden_layers", "quantization_config")
    config = LlamaConfig(**{name: value for name, value in given.items() if name not in own}, num_hidden_layers=1)
    config._attn_implementation = attention
    return config
