"""Compressed attention (DeepSeek-V4): a window of raw latents, and one compressed latent per block of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from quire.spec.config_reader import ConfigReader
from quire.spec.families.kinds import num_layers
from quire.spec.layers import CompressedCall

Layer = tuple[CompressedCall, ...]

_OVERLAPPING = 4
"""The ratio whose blocks overlap and whose entries an indexer selects."""


def applies(config: ConfigReader) -> bool:
    """Whether layers keep compressed latents."""
    return config.has("compress_ratios", "compress_rates")


def read(config: ConfigReader) -> tuple[Layer, ...]:
    """What every layer keeps."""
    count = num_layers(config)
    ratios = _ratios(config)
    if len(ratios) < count:
        raise config.refusal(f"names {len(ratios)} compress_ratios for {count} layers", "compress_ratios")
    return tuple(_layer(config, ratio) for ratio in ratios[:count])


def read_drafts(config: ConfigReader, drafts: int) -> tuple[Layer, ...]:
    """The draft layers, whose ratios may follow the model's own in the list; a draft without one keeps its window."""
    ratios = [*_ratios(config)[num_layers(config) :], *[0] * drafts][:drafts]
    return tuple(_layer(config, ratio) for ratio in ratios)


def _ratios(config: ConfigReader) -> Sequence[int]:
    if config.get("compress_ratios") is not None:
        ratios = config.sequence("compress_ratios")
    else:
        rates = config.get("compress_rates")
        ratios = [rates.get(name, 0) for name in config.sequence("layer_types")]
    if any(not isinstance(ratio, int) or ratio not in (0, _OVERLAPPING, 128) for ratio in ratios):
        raise config.refusal("compresses by a ratio other than 0, 4 and 128", "compress_ratios")
    return ratios


def _layer(config: ConfigReader, ratio: int) -> Layer:
    head_dim = config.size("head_dim")
    rope_dim = config.size("qk_rope_head_dim", default=0) or int(
        head_dim * config.number("partial_rotary_factor", default=0.125)
    )
    for name in (
        "layer_types",
        "compress_ratios",
        "compress_rates",
        "kv_lora_rank",
        "v_head_dim",
        "window_size",
        "index_topk",
        "num_key_value_heads",
    ):
        config.get(name)  # they say nothing that the ratios do not
    overlap = ratio == _OVERLAPPING
    return (
        CompressedCall(
            nope_dim=head_dim - rope_dim,
            rope_dim=rope_dim,
            window=config.size("sliding_window"),
            ratio=ratio,
            overlap=overlap,
            index_dim=config.size("index_head_dim") if overlap else 0,
        ),
    )
