"""Pooler: what turns the hidden state of a text's last token into what the model was made to give for a text.

Models that are made for it are folders of sentence-transformers (`modules.json`) that take the last token, and
checkpoints for sequence classification with one label. They generate no text. Their checkpoints need no output layer:
the embeddings stand for it at load, as in models that tie both, and nothing reads its logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quire.errors import ModelLoadError, UnsupportedModel
from quire.models.source import ModelSource, reading
from quire.spec.config_reader import HIDDEN_SIZE, ConfigReader
from quire.spec.pooling import Pooling

_MODULES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_HEAD = "score.weight"


@dataclass(frozen=True, slots=True)
class Pooler:
    """What a model gives, and the weights `[1, hidden]` of its score, None for embeddings."""

    pooling: Pooling
    head: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Results float32 `[n, hidden]`, or `[n, 1]` for scores, of hidden states `[n, hidden]` of last tokens."""
        return (hidden if self.head is None else torch.nn.functional.linear(hidden, self.head)).float()


def read_pooler(
    source: ModelSource, config: Mapping[str, Any], device: str | torch.device, dtype: torch.dtype
) -> Pooler | None:
    """The pooler of a model; None if it generates text. Raises UnsupportedModel for one that pools in another way, and
    ModelLoadError if its files cannot be read."""
    reader = ConfigReader(config)
    if reader.architecture.endswith("ForSequenceClassification"):
        head = _score_head(source).to(device, dtype)
        if len(head) != 1:
            raise UnsupportedModel(
                f"'{source.name}' has {len(head)} labels for a text, and a score is one.",
                fix="use a model with num_labels 1.",
            )
        return Pooler(Pooling(gives="scores", size=1, has_sigmoid=_has_sigmoid(source, config)), head)
    modules = source.read_beside("modules.json")
    kinds = [str(each.get("type")).rpartition(".")[2] for each in modules or ()]
    if "Pooling" not in kinds:
        return None
    if kinds not in _MODULES:
        raise UnsupportedModel(
            f"'{source.name}' computes its embeddings by {', '.join(kinds)}.",
            fix=f"use a model with the modules {', '.join(_MODULES[1])}.",
        )
    _check_mode(source, source.read_beside(f"{modules[1]['path']}/config.json") or {})
    if reader.get("is_causal") is False or reader.get("use_bidirectional_attention"):
        raise UnsupportedModel(
            f"'{source.name}' reads texts in both directions; pages hold what was computed in one.",
            fix="use a model with causal attention.",
        )
    dimensions = None if config.get("is_matryoshka") else tuple(config.get("matryoshka_dimensions") or ())
    return Pooler(
        Pooling(
            gives="embeddings", size=reader.size(*HIDDEN_SIZE), normalises=kinds == _MODULES[1], dimensions=dimensions
        )
    )


def _check_mode(source: ModelSource, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel unless the last token is taken."""
    old = [name.removeprefix("pooling_mode_") for name, on in config.items() if on is True and "_mode_" in name]
    modes = [config["pooling_mode"]] if "pooling_mode" in config else old
    if modes != ["lasttoken"]:
        raise UnsupportedModel(
            f"'{source.name}' pools by {', '.join(map(str, modes)) or 'no known mode'}, and hidden states of cached "
            "tokens are not stored.",
            fix="use a model that takes the last token (lasttoken).",
        )


def _has_sigmoid(source: ModelSource, config: Mapping[str, Any]) -> bool:
    """Whether scores are from 0 to 1, as they are if the configuration names nothing else."""
    named = (config.get("sentence_transformers") or {}).get("activation_fn") or "Sigmoid"
    if (found := str(named).rpartition(".")[2]) not in ("Sigmoid", "Identity"):
        raise UnsupportedModel(
            f"'{source.name}' computes its score by {found}.", fix="use a model with Sigmoid or Identity."
        )
    return found == "Sigmoid"


def _score_head(source: ModelSource) -> Tensor:
    """The weights of the score. Raises ModelLoadError if there are none."""
    for path in source.weight_files():
        with reading(source, path.name), safe_open(path, framework="pt") as file:
            if _HEAD in file.keys():  # noqa: SIM118 - no mapping
                found: Tensor = file.get_tensor(_HEAD)
                return found
    raise ModelLoadError(f"the weights of '{source.name}' lack '{_HEAD}'.", fix="copy all *.safetensors files.")
