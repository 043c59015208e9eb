"""The plan of an engine whose draft model stores its keys and values in the pages of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import UnsupportedModel
from quire.plan.plan import PlanSettings
from quire.spec.families import Layer
from quire.spec.kv_format import plain_format
from quire.spec.layers import FULL_GROUP, AttentionCall
from quire.spec.model import ModelSpec


def head_spec(config: Mapping[str, Any], target: ModelSpec) -> ModelSpec:
    """What the one layer of a draft head stores, by its config.json. Its number of layers there is often the target's,
    and its context that of its training."""
    heads = int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    call = AttentionCall(kv_heads=int(config.get("num_key_value_heads") or heads), key_dim=dim, value_dim=dim)
    return replace(target, architecture="EagleHead", layers=((call,),), drafts=())


def with_draft_model(spec: ModelSpec, settings: PlanSettings, draft: ModelSpec) -> tuple[ModelSpec, PlanSettings]:
    """The target `spec` with the layers of `draft` as its draft layers, and the settings of a plan for both.

    Raises UnsupportedModel if the draft cannot propose tokens of this target, or cannot share its pages.
    """
    assert settings.speculation is not None
    if draft.vocab_size != spec.vocab_size:
        raise _refusal(
            draft,
            f"has a vocabulary of {draft.vocab_size:,}, and the target has {spec.vocab_size:,}",
            "use a draft with the tokenizer of its target.",
        )
    if not all(map(_is_full_attention, draft.layers)):
        raise _refusal(
            draft,
            "has layers with windows, states, latents or indexers",
            "use a draft whose layers are all full attention.",
        )
    stored = {part.group for call in set(spec.calls) for part in call.parts(plain_format(spec.dtype), spec.dtype)}
    if FULL_GROUP not in stored:
        raise _refusal(
            draft,
            f"needs pages that hold all tokens, and {spec.architecture} has windows or states only",
            "draft from n-grams.",
        )
    context = settings.context or spec.context_length
    if context > draft.context_length:
        raise _refusal(
            draft,
            f"has a context of {draft.context_length:,} tokens, and the target's is {context:,}",
            f"use --max-model-len {draft.context_length}.",
        )
    speculation = replace(settings.speculation, num_layers=len(draft.layers))
    return replace(spec, drafts=draft.layers), replace(settings, speculation=speculation)


def _is_full_attention(layer: Layer) -> bool:
    return len(layer) == 1 and all(
        isinstance(call, AttentionCall) and not call.window and not call.index_dim for call in layer
    )


def _refusal(draft: ModelSpec, why: str, fix: str) -> UnsupportedModel:
    return UnsupportedModel(f"the draft model ({draft.architecture}) {why}.", fix=fix)
