"""Which modules each layer has, and how many parameters they have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from quire.spec.config_reader import ConfigReader
from quire.spec.families.kinds import PARALLEL, STATE, layer_kinds
from quire.spec.weights.bits import Bits
from quire.spec.weights.estimate import LayerWeights, Part
from quire.spec.weights.fields import entry, unpriced

# What a model type implies and no field says. Source: the modelling code of each type in transformers 5.23.
_PLAIN_MLP = {
    "apertus", "arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt",
    "nanochat", "nemotron", "nemotron_h", "opt", "persimmon", "phi", "starcoder2",
}  # fmt: skip
"""Two matrices in the MLP, up and down. The others have three: gate, up and down."""
_GATED_QUERY = {"afmoe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}  # where `attn_output_gate` is left out
_SHARED_EXPERT = {"llama4", "llama4_text"}  # one, as wide as a routed one
_LIGHTNING = {"minimax", "minimax_m1", "minimax_text_01"}

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_RECURRENCES = {
    "linear_num_value_heads": "delta",
    "linear_attn_config": "kda",
    "linear_num_heads": "kda",
    "conv_L_cache": "conv",
    "mamba_num_heads": "mamba",
    "mamba_n_heads": "mamba",
    "n_mamba_heads": "mamba",
    "mamba_d_state": "mamba",
    "state_size": "mamba",
}
"""The module of recurrent layers, by the first of these fields that is set."""


def modules_of_layers(config: ConfigReader) -> list[tuple[str, ...]]:
    """The modules of each layer, by their names in `_MODULES`."""
    alone = _lone_modules(config, "hybrid_override_pattern", "layers_block_type")
    num_layers = config.size("num_hidden_layers", "n_layer", "n_layers", "num_layers", default=len(alone) or None)
    if alone and len(alone) != num_layers:
        raise unpriced(config, f"names {len(alone)} layers of {num_layers}", "hybrid_override_pattern")
    if alone:
        return alone
    if config.has("block_configs"):
        parts, blocks = (("attention", "attention"), ("ffn", "mlp")), config.sequence("block_configs", num_layers)
        return [tuple(kind for part, kind in parts if not block[part].get("no_op")) for block in blocks]
    if not config.get("num_attention_heads", "n_head", "n_heads") and config.has("state_size"):
        return [("mamba",)] * num_layers
    mixers = _mixers(config, num_layers)
    parallel = ("mamba",) if config.has("mamba_d_ssm") else ()
    if config.has("enable_moe_block"):
        return [(mixer, "mlp", "moe") for mixer in mixers]
    return [(mixer, *parallel, "moe" if _is_sparse(config, index) else "mlp") for index, mixer in enumerate(mixers)]


def _lone_modules(config: ConfigReader, pattern_name: str, list_name: str) -> list[tuple[str, ...]]:
    """One module per layer where the configuration says so, in letters or in words; else nothing."""
    pattern = config.get(pattern_name, list_name, default=())
    names = [_PATTERN.get(letter, letter) for letter in pattern]
    if not isinstance(pattern, str) and not {"mlp", "moe"} & set(names):
        return []
    recurrent = {"mamba", "linear_attention"}
    if unknown := {*names} - {"mlp", "moe", "attention", "full_attention", *recurrent}:
        raise unpriced(config, f"has layers of the kind '{min(unknown)}'", list_name)
    state = _recurrence(config) if recurrent & {*names} else ""
    return [(name if name in ("mlp", "moe") else state if name in recurrent else "attention",) for name in names]


def _mixers(config: ConfigReader, num_layers: int) -> list[str]:
    """The module that mixes tokens in each layer, by its name in `_MODULES`."""
    if config.has("compress_ratios", "compress_rates"):
        return ["attention"] * num_layers
    kinds = layer_kinds(config)
    if STATE in kinds:
        state = _recurrence(config)
        return [state if kind == STATE else "attention" for kind in kinds]
    if PARALLEL not in kinds and config.has("mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"):
        raise config.missing("layer_types", "layers_block_type")
    return ["attention"] * num_layers


def _recurrence(config: ConfigReader) -> str:
    """The module that recurrent layers have."""
    if config.kind in _LIGHTNING:
        return "lightning"
    found = next((module for field, module in _RECURRENCES.items() if config.has(field)), None)
    if found is None:
        raise unpriced(config, "has layers of the kind 'linear_attention'", "layer_types")
    return found


def _num_experts(config: ConfigReader) -> int:
    if False in (config.get("enable_moe_block"), config.get("is_moe")):
        return 0
    return config.size("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", default=0)


def _is_sparse(config: ConfigReader, index: int) -> bool:
    """Whether layer `index` has experts."""
    if not _num_experts(config):
        return False
    kind, has_experts = entry(config, "mlp_layer_types", index), entry(config, "moe_layer_freq", index)
    if kind is not None or has_experts is not None:
        return kind not in (None, "dense") or bool(has_experts)
    listed = config.get("moe_layers", "moe_layers_enum")
    if listed is not None:
        return index in (map(int, listed.split(",")) if isinstance(listed, str) else listed)
    num_dense = config.size("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0)
    if index < num_dense or index in config.get("mlp_only_layers", default=()):
        return False
    if config.has("expert_layer_period"):
        return (index - int(config.get("expert_layer_offset", default=0))) % config.size("expert_layer_period") == 0
    step = config.size("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    return (index + 1) % step == 0 and index % config.size("moe_layer_freq", default=1) == 0


class _Count(NamedTuple):
    """A part before its storage is known."""

    module: str
    parameters: int
    ways: int = 1


def hidden_size(config: ConfigReader) -> int:
    """Width of the residual stream."""
    return config.size("hidden_size", "n_embd", "d_model", "n_embed")


def _attention(config: ConfigReader, index: int) -> list[_Count]:
    if config.has("o_lora_rank"):
        return _compressed_attention(config, index)
    if config.has("kv_lora_rank"):
        return _latent_attention(config, index)
    hidden = hidden_size(config)
    heads, kv_heads, key, value, num_values = _head_sizes(config, index)
    gate = heads * value if config.get("attn_output_gate", default=config.kind in _GATED_QUERY) else 0
    return [
        _Count("attention", hidden * (heads * (key + value) + gate), heads),
        _Count("attention", hidden * kv_heads * (key + value * num_values), kv_heads),
        *_indexer(config, index, hidden),
    ]


def _head_sizes(config: ConfigReader, index: int) -> tuple[int, int, int, int, int]:
    """Query heads, KV heads, width of a key, width of a value, and 0 where keys serve as values, else 1."""
    heads = config.size("num_attention_heads", "n_head", "n_heads", "num_heads")
    key = config.size("head_dim", "attention_head_dim", default=hidden_size(config) // heads)
    value = config.size("v_head_dim", default=key)
    if config.has("block_configs"):
        block = ConfigReader(entry(config, "block_configs", index)["attention"])
        return heads, heads // block.size("n_heads_in_group"), key, value, 1
    if config.has("multi_query") and not config.has("new_decoder_architecture"):
        return heads, 1, key, value, 1
    kv_heads = config.size("num_key_value_heads", "num_kv_heads", "n_kv_heads", default=heads)
    kind, pattern = entry(config, "layer_types", index), entry(config, "hybrid_layer_pattern", index)
    slides = kind == "sliding_attention" or bool(pattern)
    has_values = 1
    if slides and config.has("swa_num_key_value_heads"):
        heads, kv_heads = config.size("swa_num_attention_heads", default=heads), config.size("swa_num_key_value_heads")
        key, value = config.size("swa_head_dim", default=key), config.size("swa_v_head_dim", default=value)
    elif not slides and config.has("global_head_dim"):
        key = value = config.size("global_head_dim")
        if config.has("attention_k_eq_v"):
            kv_heads, has_values = config.size("num_global_key_value_heads", default=kv_heads), 0
    return heads, kv_heads, key, value, has_values


def _latent_attention(config: ConfigReader, index: int) -> list[_Count]:
    hidden, heads, rank = hidden_size(config), config.size("num_attention_heads"), config.size("kv_lora_rank")
    nope, rope, value = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim"), config.size("v_head_dim")
    q_rank = config.size("q_lora_rank", default=0)
    gate = hidden * value if config.has("mla_use_output_gate") else 0
    per_head = (q_rank or hidden) * (nope + rope) + rank * (nope + value) + value * hidden + gate
    return [
        _Count("attention", heads * per_head, heads),
        _Count("attention_down", hidden * (q_rank + rank + rope)),
        *_indexer(config, index, q_rank or hidden),
    ]


def _compressed_attention(config: ConfigReader, index: int) -> list[_Count]:
    """Low-rank queries and outputs around keys that are compressed over 4 or more tokens (DeepSeek-V4)."""
    hidden, heads, head_dim = hidden_size(config), config.size("num_attention_heads"), config.size("head_dim")
    q_rank, o_rank, streams = config.size("q_lora_rank"), config.size("o_lora_rank"), config.size("hc_mult", default=0)
    kind, rates = entry(config, "layer_types", index), config.get("compress_rates", default={})
    ratio = rates.get(kind, 0) if rates else entry(config, "compress_ratios", index)
    overlaps = ratio == 4  # windows of 4 overlap, so they are compressed twice; only they have an indexer
    index_heads, index_dim = (config.size("index_n_heads"), config.size("index_head_dim")) if overlaps else (0, 0)
    compressor = 2 * hidden * ((2 if overlaps else 1) * head_dim + 2 * index_dim) if ratio else 0
    return [
        _Count("attention", heads * head_dim * (q_rank + o_rank), heads),
        _Count("attention", config.size("o_groups") * o_rank * hidden, config.size("o_groups")),
        _Count("attention_down", hidden * (q_rank + head_dim)),
        _Count("compressor", compressor),
        _Count("streams", 2 * (2 + streams) * streams * streams * hidden),
        _Count("indexer", index_heads * (q_rank * index_dim + hidden)),
    ]


def _indexer(config: ConfigReader, index: int, query_width: int) -> list[_Count]:
    """The projections that select tokens for sparse attention; every rank holds them whole."""
    sparse, hidden = ConfigReader(config.get("sparse_attention_config", default=config.text)), hidden_size(config)
    heads = sparse.size("index_n_heads", "sparse_num_index_heads", default=0)
    kind, is_sparse = entry(config, "indexer_types", index), entry(sparse, "sparse_attention_freq", index)
    if not heads or kind == "shared" or is_sparse == 0:
        return []
    width = sparse.size("index_head_dim", "sparse_index_dim")
    return [_Count("indexer", heads * query_width * width + hidden * (width + heads))]


def _mamba(config: ConfigReader, index: int) -> list[_Count]:
    hidden, kernel = hidden_size(config), config.size("conv_kernel", "mamba_d_conv")
    state, expand = config.size("ssm_state_size", "mamba_d_state", "state_size"), config.size("mamba_expand", "expand")
    heads = config.size("mamba_num_heads", "mamba_n_heads", "num_heads", default=0)
    if heads:
        inner = heads * config.size("mamba_head_dim", "mamba_d_head", "head_dim", default=expand * hidden // heads)
        mixed = inner + 2 * config.size("n_groups", "mamba_n_groups") * state
        return [_Count("mamba", hidden * (2 * inner + mixed + heads) + mixed * (kernel + 1) + inner, heads)]
    inner = expand * hidden if config.has("mamba_expand") else config.size("intermediate_size")
    rank = config.size("mamba_dt_rank", "time_step_rank", default=math.ceil(hidden / 16))
    return [_Count("mamba", inner * (3 * hidden + kernel + 2 * rank + 3 * state + 4), inner)]


def _delta(config: ConfigReader, index: int) -> list[_Count]:
    """A gated delta net."""
    hidden, kernel = hidden_size(config), config.size("linear_conv_kernel_dim")
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    value = value_heads * config.size("linear_value_head_dim")
    mixed = 2 * key_heads * config.size("linear_key_head_dim") + value
    return [_Count("delta", hidden * (mixed + 2 * value + 2 * value_heads) + mixed * kernel, key_heads)]


def _kda(config: ConfigReader, index: int) -> list[_Count]:
    """Kimi delta attention: a gated delta net with gates of low rank, the output's possibly of full rank."""
    own, hidden = ConfigReader(config.get("linear_attn_config", default={})), hidden_size(config)
    heads = own.size("num_heads", default=0) or config.size("linear_num_heads")
    head_dim = own.size("head_dim", default=0) or config.size("linear_head_dim")
    kernel = own.size("short_conv_kernel_size", default=0) or config.size("linear_conv_kernel_dim")
    inner, low_rank = heads * head_dim, 1 if own.has("use_full_rank_gate") else 2
    full_rank = hidden * inner * (2 - low_rank)
    split = 4 * hidden * inner + 3 * inner * kernel + hidden * heads + low_rank * head_dim * inner + full_rank
    return [_Count("delta", split, heads), _Count("delta", low_rank * hidden * head_dim)]


def _lightning(config: ConfigReader, index: int) -> list[_Count]:
    heads = config.size("num_attention_heads")
    width = config.size("head_dim", default=hidden_size(config) // heads)
    return [_Count("attention", 5 * hidden_size(config) * heads * width, heads)]


def _conv(config: ConfigReader, index: int) -> list[_Count]:
    hidden = hidden_size(config)
    return [_Count("conv", hidden * (4 * hidden + config.size("conv_L_cache")), hidden)]


def _mlp(config: ConfigReader, index: int) -> list[_Count]:
    hidden, is_plain = hidden_size(config), config.kind in _PLAIN_MLP
    block = entry(config, "block_configs", index)
    if block:
        if not block["ffn"].get("ffn_mult"):
            raise config.missing("ffn_mult")
        width = 256 * math.ceil(int(2 * block["ffn"]["ffn_mult"] * hidden / 3) / 256)
    elif not _num_experts(config) and config.has("shared_intermediate_size"):
        width = config.size("shared_intermediate_size")
    else:
        width = config.size(
            "dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "block_ff_dim", "n_inner",
            "ffn_dim", "ffn_hidden_size", default=4 * hidden if is_plain else None,
        )  # fmt: skip
    if config.has("block_auto_adjust_ff_dim"):
        factor, step = config.number("block_ffn_dim_multiplier", default=1.0), config.size("block_multiple_of")
        width = step * math.ceil(int(factor * int(2 * width / 3)) / step)
    return [_Count("mlp", (2 if is_plain else 3) * hidden * width, width)]


def _moe(config: ConfigReader, index: int) -> list[_Count]:
    hidden, experts, matrices = hidden_size(config), _num_experts(config), 2 if config.kind in _PLAIN_MLP else 3
    width = config.size("moe_intermediate_size", "intermediate_size")
    latent = config.size("moe_latent_size", "routed_expert_hidden_size", default=0)
    implied = 1 if config.kind in _SHARED_EXPERT else 0
    num_shared = config.size("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=implied)
    shared = config.size(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
        "share_expert_dim", default=num_shared * width,
    )  # fmt: skip
    return [
        _Count("experts_beside" if config.has("enable_moe_block") else "experts",
               experts * matrices * (latent or hidden) * width, width),
        _Count("shared", matrices * hidden * shared, max(1, shared)),
        _Count("router", experts * hidden + 2 * hidden * latent),
    ]  # fmt: skip


_MODULES: Mapping[str, Callable[[ConfigReader, int], list[_Count]]] = {
    "attention": _attention, "mamba": _mamba, "delta": _delta, "kda": _kda, "lightning": _lightning, "conv": _conv,
    "mlp": _mlp, "moe": _moe, "projection": lambda config, _: [_Count("projection", 2 * hidden_size(config) ** 2)],
}  # fmt: skip


def layer_weights(
    config: ConfigReader, index: int, kinds: tuple[str, ...], bits: Bits, roots: list[str]
) -> LayerWeights:
    """The layer whose modules are `kinds`; the checkpoint knows it under one of `roots`."""
    counts = [count for kind in kinds for count in _MODULES[kind](config, index)]
    counts.append(_Count("norm", len(kinds) * hidden_size(config)))
    parts = (Part(module=m, num_parameters=n, ways=ways, bits=bits(m, roots)) for m, n, ways in counts if n)
    return LayerWeights(parts=tuple(parts))


def draft_layers(config: ConfigReader, kinds: list[tuple[str, ...]], bits: Bits) -> Iterable[LayerWeights]:
    """Layers that predict tokens ahead: a projection of two hidden states, then a layer like the last that attends."""
    number = config.size("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", default=0)
    attending = [index for index, modules in enumerate(kinds) if "attention" in modules]
    alone = _lone_modules(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    for ordinal in range(number if attending else 0):
        modules = ("projection", *(tuple(module for (module,) in alone) or kinds[attending[-1]]))
        roots = [f"mtp.layers.{ordinal}", f"mtp.{ordinal}", f"layers.{len(kinds) + ordinal}"]
        yield layer_weights(config, attending[-1], modules, bits, roots)
