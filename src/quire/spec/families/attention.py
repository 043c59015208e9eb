"""Attention over keys and values per head: head counts, widths and windows, which may differ from layer to layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.spec.config_reader import HIDDEN_SIZE, NUM_HEADS, ConfigReader
from quire.spec.families.kinds import CHUNK, FULL, NOTHING, PARALLEL, STATE, WINDOW
from quire.spec.layers import AttentionCall

Layer = tuple[AttentionCall, ...]

_OWN_KV_HEADS = {WINDOW: "swa_num_key_value_heads", FULL: "num_global_key_value_heads"}


def reader(config: ConfigReader, kinds: Sequence[str], context: int) -> Callable[[int, str], Layer]:
    """A function from (layer, kind) to the stored data of that layer.

    The last `num_kv_shared_layers` read the keys and values of earlier layers and store none.
    """
    attending = {FULL if kind == PARALLEL else kind for kind in kinds} - {STATE, NOTHING}
    if not attending:
        config.ignore("num_key_value_heads", "head_dim", "v_head_dim", "sliding_window")
        return lambda layer, kind: ()
    count = len(kinds)
    heads = config.size(*NUM_HEADS)
    mixed = WINDOW in attending  # only then may kinds differ in heads and widths
    widths = {kind: _widths(config, kind, heads, mixed) for kind in attending}
    kv_heads = _kv_heads(config, heads, count)
    own_kv_heads = {kind: config.size(name, default=0) for kind, name in _OWN_KV_HEADS.items() if mixed}
    if not config.get("attention_k_eq_v"):
        own_kv_heads.pop(FULL, None)  # Gemma 4 gives global layers KV heads of their own only if values are keys
    if config.kind == "mimo_v2_flash" and not own_kv_heads.get(WINDOW):
        own_kv_heads[WINDOW] = 2 * kv_heads[0]  # the default of the model class
    window = _window(config, kinds)
    index_dims = _index_dims(config, count)
    first_shared = count - config.size("num_kv_shared_layers", default=0)
    overrides = _overrides(config)

    def read(layer: int, kind: str) -> Layer:
        if layer >= first_shared:
            return ()
        key_dim, value_dim = widths[kind]
        own = overrides.get(layer, {})
        if "head_dim" in own:
            key_dim, value_dim = own["head_dim"], own.get("v_head_dim", own["head_dim"])
        slides = kind in (WINDOW, CHUNK) and window < context
        return (
            AttentionCall(
                kv_heads=own.get("num_key_value_heads") or own_kv_heads.get(kind) or kv_heads[layer],
                key_dim=key_dim,
                value_dim=value_dim,
                window=window if slides else 0,
                chunked=slides and kind == CHUNK,
                index_dim=index_dims[layer],
            ),
        )

    return read


_OVERRIDABLE = frozenset({"head_dim", "v_head_dim", "num_key_value_heads", "num_attention_heads"})


def _overrides(config: ConfigReader) -> Mapping[int, Mapping[str, int]]:
    """Sizes of single layers, by their number, as transformers writes configurations whose layers differ."""
    found = config.get("per_layer_config", default={})
    if not isinstance(found, Mapping) or not all(
        str(layer).isdecimal()
        and isinstance(own, Mapping)
        and not set(own) - _OVERRIDABLE
        and all(type(number) is int for number in own.values())
        for layer, own in found.items()
    ):
        raise config.refusal("sizes single layers in a way that is not known", "per_layer_config")
    return {int(layer): own for layer, own in found.items()}


def _widths(config: ConfigReader, kind: str, heads: int, mixed: bool) -> tuple[int, int]:
    """Key and value width of the layers of a kind; windows and full layers may have widths of their own."""
    own = {WINDOW: "swa_head_dim", FULL: "global_head_dim"}.get(kind) if mixed else None
    key_dim = config.size(own, default=0) if own else 0
    value_dim = config.size("swa_v_head_dim", default=0) if kind == WINDOW else 0
    if own and key_dim:
        return key_dim, value_dim or key_dim
    common = _head_dim(config, heads)
    return common, value_dim or config.size("v_head_dim", default=common)


def _head_dim(config: ConfigReader, heads: int) -> int:
    explicit = config.size("head_dim", "attention_head_dim", "kv_channels", default=0)
    if explicit:
        return explicit
    hidden = config.size(*HIDDEN_SIZE)
    if hidden % heads:
        raise config.missing("head_dim")
    return hidden // heads


def _kv_heads(config: ConfigReader, heads: int, count: int) -> Sequence[int]:
    """KV heads of every layer: one number, a list, or a group size per layer."""
    blocks = config.get("block_configs")
    if blocks is not None:
        sizes = [(block.get("attention") or {}).get("n_heads_in_group") for block in blocks]
        if any(size and heads % size for size in sizes):
            raise config.refusal(f"has groups that do not divide {heads} heads", "block_configs")
        return [heads // size if size else 0 for size in sizes]
    if config.get("multi_query_attention") and config.size("multi_query_group_num", default=0):
        return [config.size("multi_query_group_num")] * count
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        config.ignore("num_kv_heads", "num_key_value_heads")  # without effect if one head serves all
        return [1] * count
    found = config.get("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if found is None and config.is_known:
        return [heads] * count  # one per query head is a convention of known types
    if isinstance(found, list) and len(found) == count and all(isinstance(n, int) and n > 0 for n in found):
        return found
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise config.missing("num_key_value_heads")
    if found > heads:
        raise config.wrong("num_key_value_heads", found, f"at most the {heads} attention heads")
    if config.kind == "jetmoe":  # which repeats its KV heads for each expert of a token
        found *= config.size("num_experts_per_tok", default=2)
    return [found] * count


def _window(config: ConfigReader, kinds: Sequence[str]) -> int:
    if config.kind == "mimo_v2_flash":  # its windows count the tokens before the query, not the query
        before = config.size("sliding_window_size", default=0)
        config.ignore("sliding_window", "attention_chunk_size")  # other names of it, which do not count
        if before:
            return before + 1
    if WINDOW in kinds:
        return config.size("sliding_window", "attention_window_size")
    return config.size("attention_chunk_size") if CHUNK in kinds else 0


def _index_dims(config: ConfigReader, count: int) -> list[int]:
    """The width of the indexer's key of every layer, 0 if it has none (MiniMax-M3's block selection)."""
    sparse = config.get("sparse_attention_config")
    if isinstance(sparse, Mapping) and sparse.get("use_sparse_attention", True):
        width, layers = sparse.get("sparse_index_dim"), sparse.get("sparse_attention_freq")
        if not isinstance(width, int) or not isinstance(layers, list) or len(layers) != count:
            raise config.missing("sparse_attention_config.sparse_index_dim")
        return [width if flag else 0 for flag in layers]
    names = config.get("layer_types") or ()
    if "minimax_m3_sparse" in names:
        width = config.size("index_head_dim", "sparse_index_dim")
        return [width if name == "minimax_m3_sparse" else 0 for name in names]
    if sparse:
        raise config.refusal("selects tokens in a way that is not known", "sparse_attention_config")
    return [0] * count
