"""ModelSpec: what a model asks of the cache, as data. Read from a configuration by arithmetic: no torch, no weights.

`ModelSpec.from_config` describes plain attention (one call per layer, keys and values per head) or refuses; it never
guesses. What it refuses may still run: loading a model finds the same facts by running it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import UnsupportedModel
from quire.spec.group import GroupSpec
from quire.spec.layout import DType, Field, PageLayout

FULL_GROUP = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of attention in a forward pass. `window` w > 0: a query at position p reads keys `p - w < k <= p`."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Attention calls in the order of the forward pass, and the limits a request must respect.

    The index of a call in `calls` is its ordinal: pools are keyed by it, because one module may serve several layers
    and one layer may call attention twice.
    """

    architecture: str
    calls: tuple[AttentionCall, ...]
    context_length: int  # tokens
    vocab_size: int
    dtype: DType

    def groups(self, page_size: int) -> tuple[GroupSpec, ...]:
        """The cache groups: one, named "full", whose frames hold the fields "k" and "v" of every call."""
        keys = [(call.kv_heads, call.key_dim) for call in self.calls]
        values = [(call.kv_heads, call.value_dim) for call in self.calls]
        fields = (*self._fields("k", keys), *self._fields("v", values))
        return (GroupSpec(name=FULL_GROUP, layout=PageLayout(page_size, fields)),)

    def _fields(self, name: str, shapes: Sequence[tuple[int, int]]) -> list[Field]:
        """One field per distinct shape; its layers are the ordinals of the calls that have it."""
        return [
            Field(
                name=name,
                shape=shape,
                dtype=self.dtype,
                layers=tuple(ordinal for ordinal, other in enumerate(shapes) if other == shape),
            )
            for shape in dict.fromkeys(shapes)
        ]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """The spec of a Hugging Face `config.json`; the language model's part where it wraps several models.

        Raises UnsupportedModel, naming the field, where the configuration is not plain attention or lacks a size.
        """
        text = _text_config(config)
        architecture = _architecture(config, text)
        _refuse_other_kinds(text, architecture)
        num_layers = _size(text, architecture, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        heads = _size(text, architecture, "num_attention_heads", "n_head", "n_heads", "num_heads")
        key_dim = _head_dim(text, architecture, heads)
        value_dim = text.get("v_head_dim") or key_dim
        kv_heads = _kv_heads(text, architecture, heads, num_layers)
        context_length = _size(
            text, architecture, "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"
        )
        windows = _windows(text, architecture, num_layers)
        return cls(
            architecture=architecture,
            calls=tuple(
                AttentionCall(
                    kv_heads=heads_here,
                    key_dim=key_dim,
                    value_dim=int(value_dim),
                    window=window if window < context_length else 0,
                )
                for heads_here, window in zip(kv_heads, windows, strict=True)
            ),
            context_length=context_length,
            vocab_size=_size(text, architecture, "vocab_size"),
            dtype=config_dtype(config),
        )


def config_dtype(config: Mapping[str, Any]) -> DType:
    """The element type a configuration names under `dtype` or `torch_dtype`; float32 where it names none."""
    text = _text_config(config)
    found = next((part[key] for part in (text, config) for key in ("dtype", "torch_dtype") if part.get(key)), "float32")
    name = str(found).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModel(
            f"the configuration's dtype is '{name}'; Quire computes in float32, float16 or bfloat16.",
            fix="name one of these as the dtype.",
        )
    return DType(name)


_OTHER_KINDS: Mapping[str, str] = {
    "kv_lora_rank": "multi-head latent attention (MLA): what is cached is not keys and values per head",
    "index_topk": "sparse attention with an indexer",
    "compress_ratios": "compressed attention",
    "attention_chunk_size": "chunked attention",
    "mamba_d_state": "a Mamba mixer, which keeps recurrent state",
    "mamba_n_heads": "a Mamba mixer, which keeps recurrent state",
    "mamba_num_heads": "a Mamba mixer, which keeps recurrent state",
    "ssm_cfg": "a state-space mixer, which keeps recurrent state",
    "ssm_state_size": "a state-space mixer, which keeps recurrent state",
    "state_size": "a state-space mixer, which keeps recurrent state",
    "conv_L_cache": "short convolutions, which keep recurrent state",
    "linear_num_key_heads": "linear attention, which keeps recurrent state",
    "linear_num_value_heads": "linear attention, which keeps recurrent state",
    "linear_attn_config": "linear attention, which keeps recurrent state",
    "lru_width": "a recurrent unit, which keeps recurrent state",
    "swa_num_key_value_heads": "sliding layers with sizes of their own",
    "swa_head_dim": "sliding layers with sizes of their own",
    "global_head_dim": "global layers with sizes of their own",
    "num_global_key_value_heads": "global layers with sizes of their own",
    "num_kv_shared_layers": "layers that reuse the keys and values of others",
}
"""Fields that plain attention does not have, with what they mean."""

_OTHER_CALLS = frozenset({"diffllama", "hrm_text", "longcat_flash", "zamba2", "deepseek_v4", "mllama"})
"""Model types whose layers do not call attention exactly once."""

_EVERY_LAYER_SLIDES = frozenset({"mistral", "mixtral", "starcoder2", "phi3", "phimoe", "ministral"})
"""Model types where `sliding_window`, if set, holds for every layer."""

_SLIDING_PERIOD: Mapping[str, int] = {
    "gemma2": 2,
    "vaultgemma": 2,
    "gpt_oss": 2,
    "gemma3_text": 6,
    "gemma3": 6,
    "cohere2": 4,
    "olmo3": 4,
}
"""Model types where every n-th layer reads everything and the others slide, unless the configuration says otherwise."""


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and text else config


def _architecture(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    names = config.get("architectures") or text.get("architectures") or ()
    return str(names[0] if names else config.get("model_type") or "unnamed architecture")


def _refuse_other_kinds(text: Mapping[str, Any], architecture: str) -> None:
    if text.get("is_encoder_decoder"):
        raise _refusal(architecture, "is an encoder-decoder", "is_encoder_decoder")
    for field, meaning in _OTHER_KINDS.items():
        if text.get(field):
            raise _refusal(architecture, f"has {meaning}", field)
    if text.get("model_type") in _OTHER_CALLS:
        raise _refusal(architecture, "does not call attention exactly once per layer", "model_type")
    for kind in text.get("layer_types") or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise _refusal(architecture, f"has layers of kind '{kind}'", "layer_types")


def _refusal(architecture: str, what: str, field: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{architecture} {what} (configuration field '{field}'), so its cache cannot be read off the configuration.",
        fix="load the model, which finds its layout by running it, or use a plain-attention model.",
    )


def _missing(architecture: str, *names: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the configuration of {architecture} has no '{names[0]}'"
        + (f" (nor {', '.join(repr(n) for n in names[1:])})" if len(names) > 1 else "")
        + ", which the cache's layout needs.",
        fix=f"add '{names[0]}' to config.json.",
    )


def _size(text: Mapping[str, Any], architecture: str, *names: str) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise _missing(architecture, *names)


def _head_dim(text: Mapping[str, Any], architecture: str, heads: int) -> int:
    explicit = text.get("head_dim")
    if isinstance(explicit, int) and explicit > 0:
        return explicit
    hidden = _size(text, architecture, "hidden_size", "n_embd", "d_model")
    if hidden % heads:
        raise _missing(architecture, "head_dim")
    return hidden // heads


def _kv_heads(text: Mapping[str, Any], architecture: str, heads: int, num_layers: int) -> Sequence[int]:
    if text.get("multi_query"):
        return [1] * num_layers
    found = text.get("num_key_value_heads")
    if found is None:
        return [heads] * num_layers
    if isinstance(found, int):
        return [found] * num_layers
    if isinstance(found, Sequence) and len(found) == num_layers:
        return [int(count) for count in found]
    raise _missing(architecture, "num_key_value_heads")


def _windows(text: Mapping[str, Any], architecture: str, num_layers: int) -> list[int]:
    """The window of every layer, 0 for those that read everything."""
    window = int(text.get("sliding_window") or 0)
    layer_types = text.get("layer_types")
    if layer_types:
        if len(layer_types) != num_layers:
            raise UnsupportedModel(
                f"the configuration of {architecture} names {len(layer_types)} layer_types for {num_layers} layers."
            )
        if "sliding_attention" in layer_types and not window:
            raise _missing(architecture, "sliding_window")
        return [window if kind == "sliding_attention" else 0 for kind in layer_types]
    if not window:
        return [0] * num_layers
    return _windows_by_convention(text, architecture, num_layers, window)


def _windows_by_convention(text: Mapping[str, Any], architecture: str, num_layers: int, window: int) -> list[int]:
    """Windows of a configuration older than `layer_types`."""
    kind = str(text.get("model_type"))
    if kind.startswith("qwen") or "use_sliding_window" in text:
        if not text.get("use_sliding_window", False):
            return [0] * num_layers
        if kind == "qwen3_moe":  # it has no per-layer rule
            return [window] * num_layers
        first = text.get("max_window_layers")
        if not isinstance(first, int):
            raise _missing(architecture, "max_window_layers")
        return [window if layer >= first else 0 for layer in range(num_layers)]
    period = text.get("sliding_window_pattern") or _SLIDING_PERIOD.get(kind)
    if isinstance(period, int) and period > 0:
        return [window if (layer + 1) % period else 0 for layer in range(num_layers)]
    if kind in _EVERY_LAYER_SLIDES:
        return [window] * num_layers
    raise _refusal(
        architecture, f"has a sliding window of {window} without 'layer_types' that say where", "sliding_window"
    )
