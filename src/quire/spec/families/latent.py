"""Latent attention: multi-head latents (MLA), sparse ones with an indexer (DSA, NSA), compressed ones (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.spec.config_reader import ConfigReader
from quire.spec.families.kinds import FULL, num_layers
from quire.spec.layers import CompressedCall, LatentCall

_OVERLAPPING = 4
"""The ratio whose blocks overlap and whose entries an indexer selects."""


def applies(config: ConfigReader) -> bool:
    """Whether attention stores a latent instead of keys and values."""
    return config.has("kv_lora_rank")


def keeps_compressed(config: ConfigReader) -> bool:
    """Whether layers store compressed latents."""
    return config.has("compress_ratios", "compress_rates")


def reader(config: ConfigReader, count: int) -> Callable[[int, str], tuple[LatentCall, ...]]:
    """A function from (layer, kind) to the stored data of that layer."""
    rank, rope_dim = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    # the expanded form does not affect the cache
    config.ignore("v_head_dim", "head_dim", "num_key_value_heads", "sliding_window", "num_attention_heads")
    index_dim = config.size("index_head_dim") if config.has("index_topk") else 0
    owns = _index_owners(config, count) if index_dim else [False] * count

    def read(layer: int, kind: str) -> tuple[LatentCall, ...]:
        if kind != FULL:
            raise config.refusal(f"has a latent layer of kind '{kind}'", "layer_types")
        return (
            LatentCall(rank=rank, rope_dim=rope_dim, sparse=index_dim > 0, index_dim=index_dim if owns[layer] else 0),
        )

    return read


def _index_owners(config: ConfigReader, count: int) -> list[bool]:
    """Which layers have an indexer of their own; the others use the selection of the last layer that has one."""
    types = config.get("indexer_types", "index_topk_pattern")
    if isinstance(types, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in types]
    if isinstance(types, list):
        if len(types) != count or not set(types) <= {"full", "shared"}:
            raise config.refusal("names indexers that are not 'full' or 'shared', one per layer", "indexer_types")
        return [name == "full" for name in types]
    period = config.size("index_topk_freq", default=1)
    offset = config.get("index_skip_topk_offset", default=2)
    return [max(layer - offset + 1, 0) % period == 0 for layer in range(count)]


def read_compressed(config: ConfigReader) -> tuple[tuple[CompressedCall, ...], ...]:
    """What every layer keeps."""
    count = num_layers(config)
    ratios = _ratios(config)
    if len(ratios) < count:
        raise config.refusal(f"names {len(ratios)} compress_ratios for {count} layers", "compress_ratios")
    return tuple(_compressed(config, ratio) for ratio in ratios[:count])


def read_compressed_drafts(config: ConfigReader, drafts: int) -> tuple[tuple[CompressedCall, ...], ...]:
    """The draft layers, whose ratios may follow the model's own in the list; a draft without one stores its window."""
    ratios = [*_ratios(config)[num_layers(config) :], *[0] * drafts][:drafts]
    return tuple(_compressed(config, ratio) for ratio in ratios)


def _ratios(config: ConfigReader) -> Sequence[int]:
    if config.get("compress_ratios") is not None:
        ratios = config.sequence("compress_ratios")
    else:
        rates = config.get("compress_rates")
        ratios = [rates.get(name, 0) for name in config.sequence("layer_types")]
    if any(not isinstance(ratio, int) or ratio not in (0, _OVERLAPPING, 128) for ratio in ratios):
        raise config.refusal("compresses by a ratio other than 0, 4 and 128", "compress_ratios")
    return ratios


def _compressed(config: ConfigReader, ratio: int) -> tuple[CompressedCall, ...]:
    head_dim = config.size("head_dim")
    rotary = int(head_dim * config.number("partial_rotary_factor", default=0.125))
    rope_dim = config.size("qk_rope_head_dim", default=rotary)
    # the ratios already say this
    config.ignore("layer_types", "compress_ratios", "compress_rates", "kv_lora_rank", "v_head_dim")
    config.ignore("window_size", "index_topk", "num_key_value_heads")
    overlap = ratio == _OVERLAPPING
    call = CompressedCall(
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        window=config.size("sliding_window"),
        ratio=ratio,
        overlap=overlap,
        index_dim=config.size("index_head_dim") if overlap else 0,
    )
    return (call,)
