"""Which mixer each layer has. Configurations say it in a dozen ways; all of them are read into one list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.spec.config_reader import CONVENTIONS, NUM_LAYERS, ConfigReader

FULL = "full"
WINDOW = "window"
CHUNK = "chunk"
STATE = "state"
PARALLEL = "parallel"
"""Attention and a recurrence side by side, both in this layer."""
NOTHING = "nothing"
"""No mixer that stores data: an MLP or mixture of experts that counts as a layer of its own."""

MOST_LAYERS = 10_000  # no model has more, and longer lists take long to build


def layer_kinds(reader: ConfigReader) -> list[str]:
    """The kind of each layer, in order. Raises UnsupportedModel for a list of another length or an unknown kind."""
    if reader.kind == "recurrent_gemma":
        return _recurrent_gemma(reader)
    for rule in (_named, _pattern, _numbered_types, _linear_lists, _indices, _blocks, _periods):
        found = rule(reader)
        if found is not None:
            return found
    count = num_layers(reader)
    if "every_layer" in reader.implied:
        return [reader.implied["every_layer"]] * count
    if reader.kind.startswith("llama4"):
        return _llama4(reader, count)
    return _sliding(reader, count)


def num_layers(reader: ConfigReader) -> int:
    """Decoder layers."""
    count = reader.size(*NUM_LAYERS)
    if count > MOST_LAYERS:
        raise reader.wrong("num_hidden_layers", count, f"at most {MOST_LAYERS:,}")
    return count


def _named(reader: ConfigReader) -> list[str] | None:
    """A name per layer."""
    field = next((name for name in ("layers_block_type", "layer_types", "block_types") if reader.get(name)), None)
    if field is None:
        return None
    if not isinstance(reader.get(field), list):
        raise reader.refusal("has layers that are not named one by one", "layer_types")
    reader.ignore("sliding_window", "attention_chunk_size")  # where no layer slides
    reader.ignore(
        "hybrid_layer_pattern", "attn_type_list", "layer_group_size", "attn_layer_period", "attn_layer_offset"
    )
    # beside `layers_block_type` some configurations keep an older number of layers
    count = None if reader.has("layers_block_type") else reader.size(*NUM_LAYERS, default=0)
    return [_kind(reader, name, "layer_types") for name in reader.sequence(field, count or None)]


def _kind(reader: ConfigReader, name: Any, field: str) -> str:
    found = CONVENTIONS["layer_kinds"].get(str(name))
    if found is None:
        raise reader.refusal(f"has layers of kind '{name}'", field)
    return str(found)


def _pattern(reader: ConfigReader) -> list[str] | None:
    """A letter per layer, as Nemotron-H writes it."""
    pattern = reader.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern:
        return None
    return [_kind(reader, letter, "hybrid_override_pattern") for letter in pattern]


def _numbered_types(reader: ConfigReader) -> list[str] | None:
    """A number per layer: 1 for attention in MiniMax's list, 1 for a window in MiMo's."""
    for field, kinds in (("attn_type_list", (STATE, FULL)), ("hybrid_layer_pattern", (FULL, WINDOW))):
        if isinstance(reader.get(field), list):
            numbers = reader.sequence(field, num_layers(reader))
            if set(numbers) - {0, 1}:
                raise reader.refusal(f"has layers of kind {max(numbers)}", field)
            reader.ignore("attention_chunk_size")  # MiMo repeats its window under this name
            return [kinds[number] for number in numbers]
    return None


def _linear_lists(reader: ConfigReader) -> list[str] | None:
    """Kimi-Linear's lists of layer numbers, counted from 1."""
    lists = reader.get("linear_attn_config")
    if not isinstance(lists, Mapping) or "full_attn_layers" not in lists:
        return None
    full, linear = set(lists["full_attn_layers"]), set(lists.get("kda_layers") or ())
    count = num_layers(reader)
    if full & linear or full | linear != set(range(1, count + 1)):
        raise reader.refusal("names layers twice, or not all of them", "linear_attn_config")
    return [FULL if layer in full else STATE for layer in range(1, count + 1)]


def _indices(reader: ConfigReader) -> list[str] | None:
    """The numbers of the layers with attention; the others are recurrent."""
    for field in ("attn_layer_indices", "full_attn_idxs"):
        found = reader.get(field)
        if isinstance(found, list):
            return [FULL if layer in found else STATE for layer in range(num_layers(reader))]
    return None


def _blocks(reader: ConfigReader) -> list[str] | None:
    """A description per layer, as from an architecture search: some layers have lost their attention."""
    if reader.get("block_configs") is None:
        return None
    kinds: list[str] = []
    for block in reader.sequence("block_configs", num_layers(reader)):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise reader.missing("block_configs[].attention")
        if attention.get("sparsify") or attention.get("window_length"):
            raise reader.refusal("has blocks with sparse or windowed attention", "block_configs")
        dropped = attention.get("no_op") or attention.get("replace_with_linear")
        kinds.append(NOTHING if dropped else FULL)
    return kinds


def _periods(reader: ConfigReader) -> list[str] | None:
    """Every n-th layer attends and the others are recurrent."""
    period, offset = reader.get("attn_layer_period"), reader.get("attn_layer_offset", default=0)
    if isinstance(period, int) and period > 0:
        return [FULL if layer % period == offset else STATE for layer in range(num_layers(reader))]
    interval = reader.get("full_attention_interval", "layer_group_size")
    if isinstance(interval, int) and interval > 0:
        return [STATE if (layer + 1) % interval else FULL for layer in range(num_layers(reader))]
    return None


def _llama4(reader: ConfigReader, count: int) -> list[str]:
    """Layers with rotary positions attend within chunks, the others to all tokens; by default every fourth."""
    reader.ignore("attention_chunk_size")
    ropes = reader.get("no_rope_layers") or [
        int((layer + 1) % reader.size("no_rope_layer_interval", default=4) != 0) for layer in range(count)
    ]
    if len(ropes) != count:
        raise reader.refusal(f"names {len(ropes)} no_rope_layers for {count} layers", "no_rope_layers")
    return [CHUNK if rope else FULL for rope in ropes]


def _recurrent_gemma(reader: ConfigReader) -> list[str]:
    """A repeated cycle of block types, which may be incomplete at the end; every attention is a window."""
    cycle = reader.sequence("block_types" if reader.get("block_types") else "_block_types")
    reader.ignore("_block_types")
    if not cycle or set(cycle) - {"recurrent", "attention"}:
        raise reader.refusal("has blocks other than 'recurrent' and 'attention'", "block_types")
    kinds = [STATE if name == "recurrent" else WINDOW for name in cycle]
    return [kinds[layer % len(kinds)] for layer in range(num_layers(reader))]


def _sliding(reader: ConfigReader, count: int) -> list[str]:
    """Configurations older than `layer_types`: one window, and a convention for the layers that have it."""
    window = int(reader.get("sliding_window", "attention_window_size", default=0) or 0)
    if not window:
        return [FULL] * count
    if reader.kind.startswith("qwen") or "use_sliding_window" in reader.text:
        if not reader.get("use_sliding_window", default=False):
            return [FULL] * count
        if reader.kind == "qwen3_moe":  # the kind has no per-layer rule
            return [WINDOW] * count
        first = reader.get("max_window_layers")
        if not isinstance(first, int):
            raise reader.missing("max_window_layers")
        return [WINDOW if layer >= first else FULL for layer in range(count)]
    period = reader.get("sliding_window_pattern", "_sliding_window_pattern") or reader.implied.get(
        "full_attention_every"
    )
    if isinstance(period, int) and period > 0:
        return [WINDOW if (layer + 1) % period else FULL for layer in range(count)]
    if reader.implied.get("every_layer_slides"):
        return [WINDOW] * count
    raise reader.refusal(f"has a sliding window of {window} without 'layer_types' that say where", "sliding_window")
