"""Multi-head latent attention (MLA), and its sparse form with an indexer (DSA, NSA)."""

from __future__ import annotations

from collections.abc import Callable

from quire.spec.config_reader import ConfigReader
from quire.spec.families.kinds import FULL
from quire.spec.layers import LatentCall


def applies(config: ConfigReader) -> bool:
    """Whether attention keeps a latent instead of keys and values."""
    return config.has("kv_lora_rank")


def reader(config: ConfigReader, count: int) -> Callable[[int, str], tuple[LatentCall, ...]]:
    """A function from (layer, kind) to what that layer keeps."""
    rank, rope_dim = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    for name in ("v_head_dim", "head_dim", "num_key_value_heads", "sliding_window", "num_attention_heads"):
        config.get(name)  # of the expanded form; they price nothing here
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
    """Which layers have an indexer of their own; the others use the selection of the last one that has."""
    types = config.get("indexer_types", "index_topk_pattern")
    if isinstance(types, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in types]
    if isinstance(types, list):
        known = {"full": True, "shared": False}
        if len(types) != count or not set(types) <= set(known):
            raise config.refusal("names indexers that are not 'full' or 'shared', one per layer", "indexer_types")
        return [known[name] for name in types]
    period = config.size("index_topk_freq", default=1)
    offset = config.get("index_skip_topk_offset", default=2)
    return [max(layer - offset + 1, 0) % period == 0 for layer in range(count)]
