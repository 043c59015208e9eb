"""WeightEstimate: how many bytes a model's weights take on a device, estimated from its configuration alone.

Counted are matrices and norms; biases, scales of activations and other vectors are not (under 1 % of a real model).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.errors import UnsupportedModel
from quire.spec.config_reader import ConfigReader
from quire.spec.layout import DType

# What a model type implies and no field says. Source: the modelling code of each type in transformers 5.23.
_PLAIN_MLP = {
    "apertus", "arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt",
    "nanochat", "nemotron", "nemotron_h", "opt", "persimmon", "phi", "starcoder2",
}  # fmt: skip
"""Two matrices in the MLP, up and down. The others have three: gate, up and down."""
_TIED = {
    "bloom", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon", "falcon_mamba", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma4", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neo", "lfm2", "lfm2_moe", "mamba", "mpt",
    "opt", "smollm3", "starcoder2",
}  # fmt: skip
"""Shares the input embedding with the output where `tie_word_embeddings` is left out."""
_LEARNED_POSITIONS = {"gpt2", "gpt_bigcode", "gpt_neo", "opt"}
_GATED_QUERY = {"afmoe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}  # where `attn_output_gate` is left out
_SHARED_EXPERT = {"llama4", "llama4_text"}  # one, as wide as a routed one
_LIGHTNING = {"minimax", "minimax_m1", "minimax_text_01"}
_GATED_TOWER = {"gemma4_vision", "pixtral", "qwen2_5_vl"}

_UNPRICED = {
    "cross_attention_layers": "attends to another model's output",
    "hidden_size_per_layer_input": "embeds every token once more per layer",
    "is_encoder_decoder": "is an encoder and a decoder",
    "layer_group_size": "mixes attention kinds by a rule of its own",
    "kv_channels": "has experts in its attention, or an MLP of half the stated width",
    "lru_width": "has gated linear recurrent layers",
    "per_layer_config": "sizes single layers differently",
    "zero_expert_num": "has two attentions and two MLPs per layer",
}
_Bits = Callable[[str, Iterable[str]], float]
_ONE_SIZE = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Parameters of one layer that are stored alike and divided alike.

    `ways` is the largest number of ranks that divide them: the KV heads for key and value projections, 1 for what every
    rank holds whole. `bits` is what one parameter takes with its share of the scales.
    """

    module: str
    num_parameters: int
    ways: int
    bits: float

    def bytes_on_rank(self, tp: int) -> int:
        """Bytes on one of `tp` ranks, the fullest."""
        return math.ceil(self.num_parameters * self.bits / 8 / min(tp, self.ways))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The parts of one layer."""

    parts: tuple[Part, ...]

    @property
    def num_parameters(self) -> int:
        """Parameters of the layer."""
        return sum(part.num_parameters for part in self.parts)

    def bytes_on_rank(self, tp: int) -> int:
        """Bytes on one of `tp` ranks."""
        return sum(part.bytes_on_rank(tp) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEstimate:
    """Parameters by place, and the bytes they take.

    `embedding` (with learned positions) and `head` (0: shared with the embedding) are parameters of `bits` bits each,
    and so is `other`: vision towers and their projection, approximately, or 0 where the configuration does not describe
    them; audio towers are not counted. `draft_layers` predict tokens ahead and share embedding and head with the model.
    """

    embedding: int
    head: int
    layers: tuple[LayerWeights, ...]
    draft_layers: tuple[LayerWeights, ...]
    other: int
    bits: int

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, without draft layers: published sizes leave them out, too."""
        return self.embedding + self.head + self.other + sum(layer.num_parameters for layer in self.layers)

    def bytes_on_rank(self, tp: int = 1, layers: range | None = None, *, draft: bool = False) -> int:
        """Bytes on one rank of a group of `tp` that holds `layers` (None: all), a stage of a pipeline.

        The stage of the first layer holds the embedding and `other`, which tensor parallelism does not divide; that of
        the last layer holds the head, a copy of the embedding where both are one, and with `draft` the draft layers.
        Raises ValueError for a stage that is not a run of the model's layers, or tp < 1.
        """
        stage = range(len(self.layers)) if layers is None else layers
        if tp < 1 or stage.step != 1 or not 0 <= stage.start < stage.stop <= len(self.layers):
            raise ValueError(f"tp is 1 or more, a stage a run of the {len(self.layers)} layers; got {tp} and {stage}")
        is_first, is_last = stage.start == 0, stage.stop == len(self.layers)
        divided, whole = (self.embedding, self.other) if is_first else (0, 0)
        held = list(self.layers[stage.start : stage.stop])
        if is_last:
            divided += self.head or (0 if is_first else self.embedding)
            held += self.draft_layers if draft else ()
        plain = math.ceil(divided * self.bits / 8 / tp) + math.ceil(whole * self.bits / 8)
        return plain + sum(layer.bytes_on_rank(tp) for layer in held)


def read_weights(config: ConfigReader, *, dtype: DType | None = None) -> WeightEstimate:
    """The estimate for a model. Weights that are not quantised are kept in `dtype`.

    `dtype` None: what the configuration says, and bfloat16 where it says nothing. Raises UnsupportedModel for a model
    whose size its configuration does not tell, or tells in fields that are not understood here.
    """
    unpriced = [name for name in _UNPRICED if config.has(name)]
    unpriced += [name for name in _ONE_SIZE if isinstance(config.get(name), Sequence)]
    if unpriced:
        raise _refusal(config, _UNPRICED.get(unpriced[0], _UNPRICED["per_layer_config"]), unpriced[0])
    dtype = dtype or config.dtype("torch_dtype", "dtype", default=DType.BFLOAT16)
    plain = dtype.itemsize * 8
    bits, kinds = _read_bits(config, plain), _layer_kinds(config)
    layers = [_layer(config, index, modules, bits, [f"layers.{index}"]) for index, modules in enumerate(kinds)]
    embedding = config.size("vocab_size") * config.size("word_embed_proj_dim", default=_hidden(config))
    positions = config.size("n_positions", "max_position_embeddings") if config.kind in _LEARNED_POSITIONS else 0
    is_tied = bool(config.get("tie_word_embeddings", default=config.kind in _TIED))
    return WeightEstimate(
        embedding=embedding + positions * _hidden(config),
        head=0 if is_tied else embedding,
        layers=tuple(layers),
        draft_layers=tuple(_draft_layers(config, kinds, bits)),
        other=_tower(config),
        bits=plain,
    )


def _refusal(config: ConfigReader, what: str, name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{config.architecture} {what} (configuration field '{name}'), so its weights cannot be estimated.",
        fix="give the bytes of the weights; the checkpoint's files add up to them.",
    )


def _entry(config: ConfigReader, name: str, index: int) -> Any:
    """What a list with an entry per layer has for layer `index`; None where there is no such list."""
    found = config.get(name)
    if not isinstance(found, Sequence) or isinstance(found, str):
        return None
    if index >= len(found):
        raise _refusal(config, f"names {len(found)} layers and has more", name)
    return found[index]


# -- which modules a layer has

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_ATTENTIONS = {"", "full_", "sliding_", "chunked_", "indexed_", "compressed_sparse_", "heavily_compressed_"}
_LINEAR_ATTENTION = {"linear_num_value_heads": "delta", "linear_attn_config": "kda", "linear_num_heads": "kda",
                     "mamba_num_heads": "mamba", "mamba_n_heads": "mamba"}  # fmt: skip
"""What the layer type "linear_attention", a word for several mixers, means where a field is set."""


def _layer_kinds(config: ConfigReader) -> list[tuple[str, ...]]:
    """The modules of each layer, by their names in `_MODULES`."""
    alone = _lone_modules(config, "hybrid_override_pattern", "layers_block_type")
    num_layers = config.size("num_hidden_layers", "n_layer", "n_layers", "num_layers", default=len(alone) or None)
    if alone and len(alone) != num_layers:
        raise _refusal(config, f"names {len(alone)} layers of {num_layers}", "hybrid_override_pattern")
    if alone:
        return alone
    if config.has("block_configs"):
        parts, blocks = (("attention", "attention"), ("ffn", "mlp")), config.sequence("block_configs", num_layers)
        return [tuple(kind for part, kind in parts if not block[part].get("no_op")) for block in blocks]
    if not config.get("num_attention_heads", "n_head", "n_heads") and config.has("state_size"):
        return [("mamba",)] * num_layers
    mixers = [_mixer(config, name) for name in _mixer_names(config, num_layers)]
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
    return [(name if name in ("mlp", "moe") else _mixer(config, name),) for name in names]


def _mixer_names(config: ConfigReader, num_layers: int) -> list[str]:
    """What mixes tokens in each layer, in the configuration's words."""
    layers = range(num_layers)
    for name in ("layers_block_type", "layer_types"):
        if config.has(name):
            return [str(kind) for kind in config.sequence(name, num_layers)]
    if config.has("attn_type_list"):
        return ["attention" if kind else "linear_attention" for kind in config.sequence("attn_type_list", num_layers)]
    if config.has("linear_attn_config"):
        linear = set(ConfigReader(config.get("linear_attn_config")).sequence("kda_layers"))  # counted from 1
        return ["linear_attention" if index + 1 in linear else "attention" for index in layers]
    for name, other in (("attn_layer_indices", "mamba"), ("full_attn_idxs", "conv")):
        if config.has(name):
            return ["attention" if index in config.sequence(name) else other for index in layers]
    for name, offset, other in (
        ("attn_layer_period", config.get("attn_layer_offset", default=0), "mamba"),
        ("full_attention_interval", -1, "linear_attention"),
    ):
        if config.has(name):
            return ["attention" if (index - offset) % config.size(name) == 0 else other for index in layers]
    if not config.has("mamba_d_ssm") and config.has("mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"):
        raise config.missing("layer_types", "layers_block_type")
    return ["attention"] * num_layers


def _mixer(config: ConfigReader, name: str) -> str:
    """The module that a layer type means."""
    if name in ("conv", "mamba"):
        return name
    if name.removesuffix("attention") in _ATTENTIONS:
        return "attention"
    meanings = [module for field, module in _LINEAR_ATTENTION.items() if config.has(field)]
    if name != "linear_attention" or not (meanings or config.kind in _LIGHTNING):
        raise _refusal(config, f"has layers of the kind '{name}'", "layer_types")
    return meanings[0] if meanings else "lightning"


def _num_experts(config: ConfigReader) -> int:
    if False in (config.get("enable_moe_block"), config.get("is_moe")):
        return 0
    return config.size("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", default=0)


def _is_sparse(config: ConfigReader, index: int) -> bool:
    """Whether layer `index` has experts."""
    if not _num_experts(config):
        return False
    kind, has_experts = _entry(config, "mlp_layer_types", index), _entry(config, "moe_layer_freq", index)
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


# -- how many parameters a module has


class _Count(NamedTuple):
    """A part before its storage is known."""

    module: str
    parameters: int
    ways: int = 1


def _hidden(config: ConfigReader) -> int:
    return config.size("hidden_size", "n_embd", "d_model", "n_embed")


def _attention(config: ConfigReader, index: int) -> list[_Count]:
    if config.has("o_lora_rank"):
        return _compressed_attention(config, index)
    if config.has("kv_lora_rank"):
        return _latent_attention(config, index)
    hidden = _hidden(config)
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
    key = config.size("head_dim", "attention_head_dim", default=_hidden(config) // heads)
    value = config.size("v_head_dim", default=key)
    if config.has("block_configs"):
        block = ConfigReader(_entry(config, "block_configs", index)["attention"])
        return heads, heads // block.size("n_heads_in_group"), key, value, 1
    if config.has("multi_query") and not config.has("new_decoder_architecture"):
        return heads, 1, key, value, 1
    kv_heads = config.size("num_key_value_heads", "num_kv_heads", "n_kv_heads", default=heads)
    kind, pattern = _entry(config, "layer_types", index), _entry(config, "hybrid_layer_pattern", index)
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
    hidden, heads, rank = _hidden(config), config.size("num_attention_heads"), config.size("kv_lora_rank")
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
    hidden, heads, head_dim = _hidden(config), config.size("num_attention_heads"), config.size("head_dim")
    q_rank, o_rank, streams = config.size("q_lora_rank"), config.size("o_lora_rank"), config.size("hc_mult", default=0)
    kind, rates = _entry(config, "layer_types", index), config.get("compress_rates", default={})
    ratio = rates.get(kind, 0) if rates else _entry(config, "compress_ratios", index)
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
    sparse, hidden = ConfigReader(config.get("sparse_attention_config", default=config.text)), _hidden(config)
    heads = sparse.size("index_n_heads", "sparse_num_index_heads", default=0)
    kind, is_sparse = _entry(config, "indexer_types", index), _entry(sparse, "sparse_attention_freq", index)
    if not heads or kind == "shared" or is_sparse == 0:
        return []
    width = sparse.size("index_head_dim", "sparse_index_dim")
    return [_Count("indexer", heads * query_width * width + hidden * (width + heads))]


def _mamba(config: ConfigReader, index: int) -> list[_Count]:
    hidden, kernel = _hidden(config), config.size("conv_kernel", "mamba_d_conv")
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
    hidden, kernel = _hidden(config), config.size("linear_conv_kernel_dim")
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    value = value_heads * config.size("linear_value_head_dim")
    mixed = 2 * key_heads * config.size("linear_key_head_dim") + value
    return [_Count("delta", hidden * (mixed + 2 * value + 2 * value_heads) + mixed * kernel, key_heads)]


def _kda(config: ConfigReader, index: int) -> list[_Count]:
    """Kimi delta attention: a gated delta net with gates of low rank, the output's possibly of full rank."""
    own, hidden = ConfigReader(config.get("linear_attn_config", default={})), _hidden(config)
    heads = own.size("num_heads", default=0) or config.size("linear_num_heads")
    head_dim = own.size("head_dim", default=0) or config.size("linear_head_dim")
    kernel = own.size("short_conv_kernel_size", default=0) or config.size("linear_conv_kernel_dim")
    inner, low_rank = heads * head_dim, 1 if own.has("use_full_rank_gate") else 2
    full_rank = hidden * inner * (2 - low_rank)
    split = 4 * hidden * inner + 3 * inner * kernel + hidden * heads + low_rank * head_dim * inner + full_rank
    return [_Count("delta", split, heads), _Count("delta", low_rank * hidden * head_dim)]


def _lightning(config: ConfigReader, index: int) -> list[_Count]:
    heads = config.size("num_attention_heads")
    width = config.size("head_dim", default=_hidden(config) // heads)
    return [_Count("attention", 5 * _hidden(config) * heads * width, heads)]


def _conv(config: ConfigReader, index: int) -> list[_Count]:
    hidden = _hidden(config)
    return [_Count("conv", hidden * (4 * hidden + config.size("conv_L_cache")), hidden)]


def _mlp(config: ConfigReader, index: int) -> list[_Count]:
    hidden, is_plain = _hidden(config), config.kind in _PLAIN_MLP
    block = _entry(config, "block_configs", index)
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
        factor, step = config.get("block_ffn_dim_multiplier", default=1.0), config.size("block_multiple_of")
        width = step * math.ceil(int(factor * int(2 * width / 3)) / step)
    return [_Count("mlp", (2 if is_plain else 3) * hidden * width, width)]


def _moe(config: ConfigReader, index: int) -> list[_Count]:
    hidden, experts, matrices = _hidden(config), _num_experts(config), 2 if config.kind in _PLAIN_MLP else 3
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
    "mlp": _mlp, "moe": _moe, "projection": lambda config, _: [_Count("projection", 2 * _hidden(config) ** 2)],
}  # fmt: skip


def _layer(config: ConfigReader, index: int, kinds: tuple[str, ...], bits: _Bits, roots: list[str]) -> LayerWeights:
    """The layer whose modules are `kinds`; the checkpoint knows it under one of `roots`."""
    counts = [count for kind in kinds for count in _MODULES[kind](config, index)]
    counts.append(_Count("norm", len(kinds) * _hidden(config)))
    parts = (Part(module=m, num_parameters=n, ways=ways, bits=bits(m, roots)) for m, n, ways in counts if n)
    return LayerWeights(parts=tuple(parts))


def _draft_layers(config: ConfigReader, kinds: list[tuple[str, ...]], bits: _Bits) -> Iterable[LayerWeights]:
    """Layers that predict tokens ahead: a projection of two hidden states, then a layer like the last that attends."""
    number = config.size("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", default=0)
    attending = [index for index, modules in enumerate(kinds) if "attention" in modules]
    alone = _lone_modules(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    for ordinal in range(number if attending else 0):
        modules = ("projection", *(tuple(module for (module,) in alone) or kinds[attending[-1]]))
        roots = [f"mtp.layers.{ordinal}", f"mtp.{ordinal}", f"layers.{len(kinds) + ordinal}"]
        yield _layer(config, attending[-1], modules, bits, roots)


def _tower(config: ConfigReader) -> int:
    """Parameters of a vision tower and its projection, within 10 %; 0 where they are not described."""
    described = config.outer.get("vision_config")
    if not isinstance(described, Mapping):
        return 0
    vision = ConfigReader(described)
    depth = vision.size("depth", "num_hidden_layers", "vt_num_hidden_layers", default=0)
    width = vision.size("hidden_size", "vt_hidden_size", default=0)
    inner = vision.size("intermediate_size", "vt_intermediate_size", default=0)
    matrices = 3 if vision.kind in _GATED_TOWER else 2
    layers = depth * width * (4 * vision.size("qkv_hidden_size", default=width or 1) + matrices * inner)
    entries = vision.size("num_position_embeddings", "position_embedding_size", default=0)
    entries += 3 * vision.size("patch_size", default=0) ** 2 * vision.size("temporal_patch_size", default=1)
    merge = described.get("merge_kernel_size") or [vision.size("spatial_merge_size", default=1)]
    merged, out = width * merge[0] ** 2, vision.size("out_hidden_size", "text_hidden_size", default=_hidden(config))
    num_mergers = 1 + len(described.get("deepstack_visual_indexes") or ())
    projection = num_mergers * merged * (merged + out) if merge[0] > 1 else width * out
    return layers + entries * width + projection if inner else 0


# -- how many bits a parameter takes

_CHECKPOINT_NAMES: Mapping[str, tuple[str, ...]] = {
    "attention": ("self_attn.q_proj", "attn.wq_b", "mixer.q_proj"),
    "attention_down": ("self_attn.kv_a_proj_with_mqa", "attn.fused_wqa_wkv"), "indexer": ("self_attn.indexer.wq_b",),
    "delta": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz", "self_attn.q_proj"),
    "mamba": ("mixer.in_proj", "mamba.in_proj"), "conv": ("conv.in_proj",),
    "mlp": ("mlp.down_proj", "ffn.down_proj", "feed_forward.down_proj", "mixer.down_proj"),
    "experts": ("mlp.experts.0.down_proj", "ffn.experts.0.down_proj", "feed_forward.experts.0.down_proj",
                "mixer.experts.0.down_proj", "block_sparse_moe.experts.0.w2"),
    "experts_beside": ("experts.0.down_proj", "moe.experts.0.down_proj"),
    "shared": ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj", "ffn.shared_experts.down_proj",
               "feed_forward.shared_expert.down_proj", "mixer.shared_experts.down_proj"),
}  # fmt: skip
"""What checkpoints call a matrix of each part. Parts without a name are never quantised: norms, routers, states."""

_ALGORITHMS = {
    "FP8": 8.0, "FP8_PB_WO": 8 + 2**-9, "FP8_PER_CHANNEL_PER_TOKEN": 8.0, "INT8_SQ": 8.0, "MXFP8": 8.25, "MXFP4": 4.25,
    "FBGEMM_FP8": 8.0, "NVFP4": 4.5, "NVFP4_AWQ": 4.5, "W4A16_NVFP4": 4.5, "W4A16_AWQ": 4.125, "W4A8_AWQ": 4.125,
}  # fmt: skip
"""Bits of one parameter with its share of the scales, by ModelOpt's `quant_algo`."""


class _Names:
    """Module names from a quantisation's lists: exact, with `*`, or "re:" and a regular expression."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._exact: set[str] = set()
        expressions = []
        for pattern in patterns:
            trimmed = re.sub(r"^((model|language_model|backbone|transformer)\.)+", "", pattern)
            if pattern.startswith("re:"):
                expressions.append(f"(?:{pattern.removeprefix('re:')})")
            elif "*" in pattern:
                expressions.append(re.escape(trimmed).replace(r"\*", ".*") + r"(\..*)?$")
            else:
                self._exact.add(trimmed)
        self._expression = re.compile("|".join(expressions) or "(?!)")

    def include(self, name: str) -> bool:
        """Whether the lists name this module, or one around it."""
        steps = name.split(".")
        runs = (".".join(steps[i:j]) for i in range(len(steps)) for j in range(i + 1, len(steps) + 1))
        return not self._exact.isdisjoint(runs) or any(self._expression.match(one) for one in (name, f"model.{name}"))


def _read_bits(config: ConfigReader, plain: float) -> _Bits:
    """The bits of one parameter of a part of the layer that the checkpoint knows under some roots."""
    rules = tuple(_rules(config, plain))

    def bits(part: str, roots: Iterable[str]) -> float:
        names = [f"{root}.{name}" for root in roots for name in _CHECKPOINT_NAMES.get(part, ())]
        return next((bits for named, bits in rules if any(map(named.include, names))), plain)

    return bits


def _rules(config: ConfigReader, plain: float) -> Iterable[tuple[_Names, float]]:
    """Which modules take how many bits; the first rule that names a module decides."""
    found: Mapping[str, Any] = config.get("quantization_config", "compression_config", "quantization", default={})
    method, algorithm = str(found.get("quant_method") or "").lower(), str(found.get("quant_algo") or "").upper()
    fields = ["modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "exclude_modules"]
    if method != "fp8":
        fields.append("ignore")  # beside fp8 it belongs to a second quantisation, and names what stays fp8
    yield _Names(name for field in fields for name in found.get(field) or ()), plain
    layers = found.get("quantized_layers") or {}
    for name in sorted({str(how["quant_algo"]) for how in layers.values()}):
        yield _Names(layer for layer, how in layers.items() if how["quant_algo"] == name), _algorithm(config, name)
    if method == "fp8" and config.get("expert_dtype") == "fp4":
        yield _Names(["re:.*[.]experts[.]"]), _ALGORITHMS["MXFP4"]
    if method != "fp8" and found.get("config_groups"):
        for group in found["config_groups"].values():
            if group.get("weights"):
                targets = ["re:.*" if target == "Linear" else target for target in group["targets"]]
                yield _Names(targets), _group_bits(group["weights"])
    elif found and (method == "fp8" or algorithm != "MIXED_PRECISION"):
        yield _Names(["re:.*"]), _uniform_bits(config, found, method, algorithm)


def _uniform_bits(config: ConfigReader, found: Mapping[str, Any], method: str, algorithm: str) -> float:
    """Bits of one parameter where one method quantises everything that is quantised."""
    if method == "fp8":
        block = found.get("weight_block_size")
        return 8 + (32 / int(block[0] * block[1]) if block else 0)
    if method in ("awq", "gptq"):
        bits, group = int(found.get("bits", found.get("w_bit", 4))), int(found.get("group_size") or 128)
        return bits + ((16 + bits) / group if group > 0 else 0)
    if method == "bitsandbytes":
        return 8 if not found.get("load_in_4bit") else 4.127 if found.get("bnb_4bit_use_double_quant") else 4.5
    return _algorithm(config, algorithm or method.upper())


def _algorithm(config: ConfigReader, name: str) -> float:
    if name.upper() not in _ALGORITHMS:
        raise _refusal(config, f"is quantised by '{name}'", "quantization_config")
    return _ALGORITHMS[name.upper()]


def _group_bits(weights: Mapping[str, Any]) -> float:
    """Bits of one parameter under a compressed-tensors scheme: 16-bit scales of integers, 8-bit ones of floats."""
    bits, group, block = int(weights["num_bits"]), int(weights.get("group_size") or 0), weights.get("block_structure")
    if block:
        return bits + 32 / int(block[0] * block[1])
    zero_point = bits if weights.get("symmetric") is False else 0
    return bits + ((8 if weights.get("type") == "float" else 16) + zero_point) / group if group > 0 else bits
