"""Speculation in a plan: draft layers in the pages of the target, what they take, and what a plan says of it.

What a draft model or head says of itself in its configuration is checked here, before any weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import InvalidInput, ModelLoadError, UnsupportedModel
from quire.plan.budget import counted
from quire.plan.devices import Line
from quire.plan.plan import Plan
from quire.plan.settings import PlanSettings
from quire.plan.source import read_model_config
from quire.spec.config_reader import ConfigReader
from quire.spec.families import Layer, draft_like
from quire.spec.kv_format import plain_format
from quire.spec.layers import FULL_GROUP, AttentionCall, LatentCall
from quire.spec.model import ModelSpec
from quire.spec.speculation import (
    SpeculativeConfig,
    get_alloc_reserve_per_decode,
    get_drafts_beyond_end,
    get_kept_features,
)
from quire.spec.weights import WeightEstimate

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def check_head(name: str, config: Mapping[str, Any], hidden_size: int) -> None:
    """Raise UnsupportedModel if a config.json is not that of a head for a target of this hidden size."""
    kind = config.get("model_type", "llama")
    if kind != "llama":
        raise UnsupportedModel(
            f"the layer of the head '{name}' is of type '{kind}'.", fix="use a head whose layer is that of a llama."
        )
    if config.get("quantization_config"):
        raise UnsupportedModel(f"the head '{name}' is quantised.", fix="use the head in bfloat16.")
    if _eagle_config(config).get("use_aux_hidden_state") is False:
        raise UnsupportedModel(
            f"the head '{name}' reads no hidden states of inner layers (use_aux_hidden_state).", fix="use another head."
        )
    if config.get("hidden_size") != hidden_size:
        raise UnsupportedModel(
            f"the head '{name}' has a hidden size of {config.get('hidden_size')}, and the target of {hidden_size}.",
            fix="use a head that was trained for this target.",
        )


def captured_layers(name: str, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The target's layers, from 0, whose outputs an EAGLE-3 head reads: as its config.json says, or a low, a middle and
    a high one. Raises UnsupportedModel if the target has no such layer.

    The field has two meanings of an id. In `eagle_config`, which SpecForge and ModelOpt write and SGLang reads, i is
    the output of layer i. Outside of it, where speculators writes it for vLLM, i is the input of layer i.
    """
    nested, outer = _eagle_config(config).get(LAYER_IDS), config.get(LAYER_IDS)
    default = [1, num_layers // 2 - 1, num_layers - 4]
    named, first = (nested, 0) if nested else (outer, 1) if outer else (default, 0)
    last = num_layers - 1 + first
    if not isinstance(named, list) or any(type(layer) is not int or not first <= layer <= last for layer in named):
        raise UnsupportedModel(
            f"the head '{name}' reads the layers {named}, and the target has {num_layers}: ids from {first} to {last}.",
            fix=f"use a head that was trained for this target, or correct '{LAYER_IDS}' in its config.json.",
        )
    return tuple(layer - first for layer in named)


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("eagle_config")
    return found if isinstance(found, Mapping) else {}


_PREDICTING = (
    *("deepseek_v3", "glm4_moe", "mellum"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
"""Model types whose prediction layers transformers computes, and of which it is known what they store."""

_SHARED = ("embed_tokens.weight", "shared_head.head.weight")


def refuse_mtp(config: Mapping[str, Any], name: str) -> None:
    """Raise UnsupportedModel if the model of this configuration has no prediction layers that an engine can run."""
    kind = ConfigReader(config).kind
    if kind not in _PREDICTING:
        raise UnsupportedModel(
            f"'{name}' is of type '{kind}', of which transformers computes no prediction layers.",
            fix=f"use another method, such as ngram; mtp runs {', '.join(_PREDICTING)}.",
        )


def prediction_tensors(names: Iterable[str], num_layers: int, name: str) -> list[str]:
    """Those of these tensors that are weights of the first prediction layer of a model of so many layers.

    Copies of what the model has are left out. Raises ModelLoadError, naming the model, if there are none.
    """
    own = re.compile(rf"(model\.)?(language_model\.)?(mtp\.(?!layers\.[1-9])|layers\.{num_layers}\.)")
    found = [each for each in names if own.match(each) and not each.endswith(_SHARED)]
    if not found:
        raise ModelLoadError(
            f"'{name}' has no weights of a prediction layer: no tensor is named 'mtp.*' or "
            f"'model.layers.{num_layers}.*'.",
            fix="use a checkpoint that has them, or another method, such as ngram.",
        )
    return found


def head_spec(config: Mapping[str, Any], target: ModelSpec) -> ModelSpec:
    """What the one layer of a draft head stores, by its config.json. Its number of layers there is often the target's,
    and its context that of its training. Raises UnsupportedModel if it lacks a size."""
    reader = ConfigReader(config)
    heads = reader.size("num_attention_heads")
    dim = reader.size("head_dim", default=reader.size("hidden_size") // heads)
    call = AttentionCall(kv_heads=reader.size("num_key_value_heads", default=heads), key_dim=dim, value_dim=dim)
    return replace(target, architecture="EagleHead", layers=((call,),), drafts=())


def configured_draft(speculation: SpeculativeConfig | None, target: ModelSpec) -> tuple[ModelSpec, ...]:
    """The draft model or head of an engine, by its configuration; empty if it has none of its own. Raises
    ModelLoadError, and what `ModelSpec.from_config` and `head_spec` raise."""
    if speculation is None or speculation.model is None:
        return ()
    found = read_model_config(speculation.model, speculation.revision)[0]
    return (ModelSpec.from_config(found) if speculation.method == "draft_model" else head_spec(found, target),)


def with_draft_model(spec: ModelSpec, settings: PlanSettings, draft: ModelSpec) -> tuple[ModelSpec, PlanSettings]:
    """The target `spec` with the layers of `draft` as its draft layers, and the settings of a plan for both.

    Raises UnsupportedModel if the draft cannot propose tokens of this target, or cannot share its pages.
    """
    assert settings.speculative_config is not None
    if draft.vocab_size != spec.vocab_size:
        raise _refusal(
            draft,
            f"has a vocabulary of {draft.vocab_size:,}, and the target has {spec.vocab_size:,}",
            "use a draft with the tokenizer of its target.",
        )
    if not all(map(_is_full_attention, draft.layers)):
        raise _refusal(
            draft, "has layers with windows, states or indexers", "use a draft whose layers are all full attention."
        )
    stored = {part.group for call in set(spec.calls) for part in call.parts(plain_format(spec.dtype), spec.dtype)}
    if FULL_GROUP not in stored:
        raise _refusal(
            draft,
            f"needs pages that hold all tokens, and {spec.architecture} has windows or states only",
            "draft from n-grams.",
        )
    context = settings.max_model_len or spec.context_length
    if context > draft.context_length:
        raise _refusal(
            draft,
            f"has a context of {draft.context_length:,} tokens, and the target's is {context:,}",
            f"use --max-model-len {draft.context_length}.",
        )
    speculation = replace(settings.speculative_config, num_layers=len(draft.layers))
    return replace(spec, drafts=draft.layers), settings.changed(speculative_config=speculation)


def _is_full_attention(layer: Layer) -> bool:
    return len(layer) == 1 and all(
        (isinstance(call, AttentionCall) and not call.window and not call.index_dim)
        or (isinstance(call, LatentCall) and not call.sparse)
        for call in layer
    )


def _refusal(draft: ModelSpec, why: str, fix: str) -> UnsupportedModel:
    return UnsupportedModel(f"the draft ({draft.architecture}) {why}.", fix=fix)


def refuse_draft_layers(settings: PlanSettings, feature: str) -> None:
    """Raise InvalidInput for drafts that branch or have layers, beside a `feature` that has no place for these."""
    drafts = settings.speculative_config
    if drafts is not None and drafts.topk > 1:
        raise InvalidInput(
            f"{feature}: drafts of one request that branch cannot be verified.",
            fix="propose one draft per position (topk 1).",
        )
    if drafts is not None and drafts.num_layers:
        raise InvalidInput(
            f"{feature}: the draft layers of {drafts.method} read all tokens on the device.",
            fix=f"draft from n-grams, or leave {feature} out.",
        )


def with_draft_layers(spec: ModelSpec, speculation: SpeculativeConfig | None) -> tuple[ModelSpec, int]:
    """The spec with draft layers if speculation has any, and how many: the model's own, else some like its
    attention."""
    if speculation is None:
        return spec, 0
    if speculation.num_layers and not spec.drafts:
        spec = replace(spec, drafts=(draft_like(spec.layers),))
    return spec.with_rollback(), speculation.num_layers


# -- what a plan says of it: nothing without speculation


def draft_weight_lines(settings: PlanSettings) -> Iterator[Line]:
    """The ledger's line of the weights of a draft model."""
    if settings.draft_weight_bytes is not None:
        why = "the draft model's, from its configuration"
        yield Line(name="draft weights", bytes=settings.draft_weight_bytes, why=why, estimated=True)


def feature_lines(settings: PlanSettings, spec: ModelSpec, page_size: int) -> tuple[Line, ...]:
    """The ledger's line of what a draft head keeps; empty without a head or a device."""
    speculation, step = settings.speculative_config, page_size * settings.parallel.dcp
    count = get_kept_features(speculation, step) if speculation is not None and speculation.num_layers else 0
    within_rest = settings.mem_fraction_static is not None and settings.measured is None
    if settings.rank_device is None or not count or within_rest:
        return ()
    requests = max(1, (settings.concurrency or settings.max_running_requests) // settings.parallel.dp)
    size = spec.hidden_size * spec.dtype.itemsize
    why = f"2 times {count:,} vectors of {size:,} bytes for each of {counted(requests, 'request')}"
    return (Line(name="draft features", bytes=2 * requests * count * size, why=why),)


def draft_weight_notes(plan: Plan, weights: WeightEstimate | None) -> Iterator[str]:
    """Notes on weights that the ledger leaves out."""
    settings, drafts = plan.settings, plan.settings.speculative_config
    if drafts is None or not drafts.num_layers:
        return
    if settings.rank_device is None or settings.draft_weight_bytes is not None:
        return
    if drafts.method != "mtp":
        yield "the ledger leaves out the weights of the draft: they are not estimated."
    elif weights is not None and not weights.draft_layers and settings.weight_bytes is None:
        yield "the ledger leaves out the weights of the prediction layer, which the configuration does not describe."


def speculation_as_dict(plan: Plan) -> dict[str, Any] | None:
    """What drafts take: tokens of a request in a step, tokens that each request reserves, bytes of a token in draft
    layers of full groups, and bytes of features that a head keeps beside the pools."""
    config, size = plan.settings.speculative_config, plan.page_size
    if config is None:
        return None
    own = len(plan.spec.calls)
    fields = [
        field for pool in plan.config.pools if pool.group.reach.kind == "full" for field in pool.group.layout.fields
    ]
    shares = [sum(layer >= own for layer in field.layers) / len(field.layers) for field in fields]
    return {
        "method": config.method,
        "draft_tokens": config.num_draft_tokens - 1,
        "reserved_tokens": get_alloc_reserve_per_decode(config, plan.tokens_per_page),
        "draft_bytes_per_token": sum(
            field.bytes_per_frame(size) / size * share for field, share in zip(fields, shares, strict=True)
        ),
        "draft_feature_bytes": plan.memory.feature_bytes,
    }


def reserve_told(plan: Plan) -> str:
    """The end of a remark on the longest request."""
    reserved = get_drafts_beyond_end(plan.settings.speculative_config, plan.tokens_per_page)
    return f"; less {reserved:,} reserved for drafts" if reserved else ""
