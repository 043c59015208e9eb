"""Which modules each layer has, and how many parameters they have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quire.spec.config_reader import HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS, ConfigReader
from quire.spec.families import Layer, state
from quire.spec.layers import AttentionCall, CompressedCall, LatentCall, StateCall
from quire.spec.weights.bits import Bits
from quire.spec.weights.estimate import LayerWeights
from quire.spec.weights.estimate import ModuleWeights as Module

_OTHERS = ("mlp", "moe")
_LONE = {
    "M": "state", "mamba": "state", "linear_attention": "state", "*": "attention", "attention": "attention",
    "full_attention": "attention", "-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe",
}  # fmt: skip
"""The module of a layer that has only one, by its letter in a pattern or its name in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModules:
    """The contents of one layer: the calls of its mixers, and the names of its other modules."""

    index: int
    calls: Layer
    others: tuple[str, ...]


def modules_of_layers(config: ConfigReader, layers: tuple[Layer, ...]) -> list[LayerModules]:
    """The modules of each of these layers."""
    recurrent = any(isinstance(call, StateCall) for layer in layers for call in layer)
    if not recurrent and config.has("mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"):
        raise config.missing("layer_types", "layers_block_type")
    return [
        LayerModules(index=index, calls=calls, others=others)
        for index, (calls, others) in enumerate(zip(layers, _others(config, layers), strict=True))
    ]


def _others(config: ConfigReader, layers: tuple[Layer, ...]) -> list[tuple[str, ...]]:
    """The modules of each layer beside its mixers."""
    alone = _lone_modules(config, "hybrid_override_pattern", "layers_block_type")
    if alone and len(alone) != config.size(*NUM_LAYERS, default=len(alone)):
        raise config.unpriced(f"names {len(alone)} layers of {config.size(*NUM_LAYERS)}", "hybrid_override_pattern")
    if alone:
        return [(name,) if name in _OTHERS else () for name in alone]
    if config.has("block_configs"):
        blocks = config.sequence("block_configs", len(layers))
        if any(block["attention"].get("replace_with_linear") for block in blocks):
            raise config.unpriced("has layers with a matrix instead of attention", "block_configs")
        return [() if block["ffn"].get("no_op") else ("mlp",) for block in blocks]
    if not config.get(*NUM_HEADS[:3]) and config.has("state_size"):
        return [()] * len(layers)
    if config.has("enable_moe_block"):
        return [("mlp", "moe")] * len(layers)
    return [("moe",) if _is_sparse(config, index) else ("mlp",) for index in range(len(layers))]


def _lone_modules(config: ConfigReader, pattern_name: str, list_name: str) -> list[str]:
    """The only module of each layer, if the configuration describes such layers by letters or names; else nothing."""
    pattern = config.get(pattern_name, list_name, default=())
    names = [_LONE.get(name, "") for name in pattern]
    if not isinstance(pattern, str) and not {"mlp", "moe"} & set(names):
        return []
    if "" in names:
        raise config.unpriced(f"has layers of the kind '{pattern[names.index('')]}'", list_name)
    return names


def _num_experts(config: ConfigReader) -> int:
    if False in (config.get("enable_moe_block"), config.get("is_moe")):
        return 0
    return config.size("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", default=0)


def _is_sparse(config: ConfigReader, index: int) -> bool:
    """Whether layer `index` has experts."""
    if not _num_experts(config):
        return False
    kind, has_experts = config.entry("mlp_layer_types", index), config.entry("moe_layer_freq", index)
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


def _attention(config: ConfigReader, call: AttentionCall) -> list[Module]:
    hidden, heads, value_matrices = config.size(*HIDDEN_SIZE), config.size(*NUM_HEADS), 1
    if call.window and config.has("swa_num_key_value_heads"):
        heads = config.size("swa_num_attention_heads", default=heads)
    elif not call.window and config.has("global_head_dim") and config.has("attention_k_eq_v"):
        value_matrices = 0  # keys serve as values
    gate = heads * call.value_dim if config.get("attn_output_gate", default=config.implied.get("gated_query")) else 0
    return [
        Module("attention", hidden * (heads * (call.key_dim + call.value_dim) + gate), heads),
        Module("attention", hidden * call.kv_heads * (call.key_dim + call.value_dim * value_matrices), call.kv_heads),
        *_indexer(config, call.index_dim, hidden),
    ]


def _latent_attention(config: ConfigReader, call: LatentCall) -> list[Module]:
    hidden, heads, rank = config.size(*HIDDEN_SIZE), config.size(*NUM_HEADS), call.rank
    nope, value = config.size("qk_nope_head_dim"), config.size("v_head_dim")
    q_rank = config.size("q_lora_rank", default=0)
    gate = hidden * value if config.has("mla_use_output_gate") else 0
    per_head = (q_rank or hidden) * (nope + call.rope_dim) + rank * (nope + value) + value * hidden + gate
    return [
        Module("attention", heads * per_head, heads),
        Module("attention_down", hidden * (q_rank + rank + call.rope_dim)),
        *_indexer(config, call.index_dim, q_rank or hidden),
    ]


def _compressed_attention(config: ConfigReader, call: CompressedCall) -> list[Module]:
    """Low-rank queries and outputs around compressed keys. Blocks that overlap are compressed twice."""
    hidden, heads, head_dim = config.size(*HIDDEN_SIZE), config.size(*NUM_HEADS), call.nope_dim + call.rope_dim
    q_rank, o_rank, streams = config.size("q_lora_rank"), config.size("o_lora_rank"), config.size("hc_mult", default=0)
    index_heads = config.size("index_n_heads") if call.index_dim else 0
    compressor = 2 * hidden * ((2 if call.overlap else 1) * head_dim + 2 * call.index_dim) if call.ratio else 0
    return [
        Module("attention", heads * head_dim * (q_rank + o_rank), heads),
        Module("attention", config.size("o_groups") * o_rank * hidden, config.size("o_groups")),
        Module("attention_down", hidden * (q_rank + head_dim)),
        Module("compressor", compressor),
        Module("streams", 2 * (2 + streams) * streams * streams * hidden),
        Module("indexer", index_heads * (q_rank * call.index_dim + hidden)),
    ]


def _indexer(config: ConfigReader, width: int, query_width: int) -> list[Module]:
    """The projections that select tokens for sparse attention; every rank has them whole."""
    if not width:
        return []
    sparse = ConfigReader(config.get("sparse_attention_config", default=config.text))
    heads = sparse.size("index_n_heads", "sparse_num_index_heads")
    return [Module("indexer", heads * query_width * width + config.size(*HIDDEN_SIZE) * (width + heads))]


def _recurrence(config: ConfigReader, call: StateCall) -> list[Module]:
    """A recurrent layer: its projections, from the shapes of its state."""
    hidden, heads, inner, kernel = config.size(*HIDDEN_SIZE), call.heads, call.channels, call.kernel
    mixed = inner + call.groups * call.group_channels  # what the convolution reads
    match state.read(config)[0]:
        case "mamba2":
            return [Module("mamba", hidden * (2 * inner + mixed + heads) + mixed * (kernel + 1) + inner, heads)]
        case "mamba":
            rank = config.size("mamba_dt_rank", "time_step_rank", default=math.ceil(hidden / 16))
            return [Module("mamba", inner * (3 * hidden + kernel + 2 * rank + 3 * call.matrix[-1] + 4), inner)]
        case "delta":
            return [Module("delta", hidden * (mixed + 2 * inner + 2 * heads) + mixed * kernel, call.groups)]
        case "kda":  # a gated delta net with gates of low rank, the output's possibly of full rank
            own = ConfigReader(config.get("linear_attn_config", default={}))
            width, is_full = heads * call.matrix[0], own.has("use_full_rank_gate")
            low_rank = (1 if is_full else 2) * call.matrix[0]
            split = (5 if is_full else 4) * hidden * width + 3 * width * kernel + hidden * heads + low_rank * width
            return [Module("delta", split, heads), Module("delta", low_rank * hidden)]
        case "lightning":
            return [Module("attention", 5 * hidden * heads * call.matrix[0], heads)]
        case "conv":
            return [Module("conv", hidden * (4 * hidden + kernel), hidden)]
    raise config.unpriced("has gated linear recurrent layers", "lru_width")


def _mlp(config: ConfigReader, index: int) -> list[Module]:
    hidden, is_plain = config.size(*HIDDEN_SIZE), config.implied.get("plain_mlp", False)
    block = config.entry("block_configs", index)
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
    return [Module("mlp", (2 if is_plain else 3) * hidden * width, width)]


def _moe(config: ConfigReader) -> list[Module]:
    hidden, experts = config.size(*HIDDEN_SIZE), _num_experts(config)
    matrices = 2 if config.implied.get("plain_mlp") else 3
    width = config.size("moe_intermediate_size", "intermediate_size")
    latent = config.size("moe_latent_size", "routed_expert_hidden_size", default=0)
    implied = config.implied.get("shared_experts", 0)
    num_shared = config.size("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=implied)
    shared = config.size(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
        "share_expert_dim", default=num_shared * width,
    )  # fmt: skip
    routed = "experts_beside" if config.has("enable_moe_block") else "experts"
    return [
        Module(routed, experts * matrices * (latent or hidden) * width, width),
        Module("shared", matrices * hidden * shared, max(1, shared)),
        Module("router", experts * hidden + 2 * hidden * latent),
    ]


def layer_weights(config: ConfigReader, layer: LayerModules, bits: Bits, roots: list[str]) -> LayerWeights:
    """The weights of a layer, which the checkpoint stores under one of `roots`."""
    hidden = config.size(*HIDDEN_SIZE)
    modules: list[Module] = []
    for call in layer.calls:
        match call:
            case AttentionCall():
                modules += _attention(config, call)
            case LatentCall():
                modules += _latent_attention(config, call)
            case CompressedCall():
                modules += _compressed_attention(config, call)
            case StateCall():
                modules += _recurrence(config, call)
    for name in layer.others:
        match name:
            case "mlp":
                modules += _mlp(config, layer.index)
            case "moe":
                modules += _moe(config)
            case "projection":
                modules.append(Module("projection", 2 * hidden**2))
    modules.append(Module("norm", (len(layer.calls) + len(layer.others)) * hidden))
    return tuple(each._replace(bits=bits(each.module, roots)) for each in modules if each.num_parameters)


def draft_layers(config: ConfigReader, layers: list[LayerModules], bits: Bits) -> Iterator[LayerWeights]:
    """Layers that predict tokens ahead: a projection of two hidden states, then a layer like the last with
    attention."""
    attending = [layer for layer in layers if any(not isinstance(call, StateCall) for call in layer.calls)]
    alone = _lone_modules(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    for ordinal in range(config.num_draft_layers if attending else 0):
        last = attending[-1]
        others: Iterable[str] = [name for name in alone if name in _OTHERS] if alone else last.others
        draft = LayerModules(index=last.index, calls=last.calls, others=("projection", *others))
        roots = [f"mtp.layers.{ordinal}", f"mtp.{ordinal}", f"layers.{len(layers) + ordinal}"]
        yield layer_weights(config, draft, bits, roots)
