"""From a configuration to layers: which mixer each layer has, and what that mixer keeps. One file per kind of mixer."""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.spec.config_reader import ConfigReader
from quire.spec.families import attention, compressed, latent, state
from quire.spec.families.kinds import FULL, NOTHING, PARALLEL, STATE, layer_kinds
from quire.spec.layers import AttentionCall, Call, CompressedCall, LatentCall
from quire.spec.layout import DType

Layer = tuple[Call, ...]

_UNKNOWN_MEMORY = re.compile(
    r"mamba|(^|_)ssm(_|$)|linear_(attn|num|key|value|conv)|kv_lora|^compress|recurren|rwkv|retention|lru_|delta|"
    r"index_(head|topk$)|attention_chunk|per_layer_config|sparse_attention|window|kv_shared|layer_types|block_type|conv_(kernel|L_)|(swa|global)_.*head|"
    r"head_dim|kv_heads|cross_attention_layers|attn_type|state_size"
)
"""Names of fields that say what a layer keeps. One that is set and that no reader asked for is a reason to refuse."""

_OF_NO_MATTER = re.compile(
    r"rope|^mlp_|^mtp_|^moe_|mamba_(proj|conv|rms|norm|hidden|chunk|dt|inner|ssm)|use_mamba_kernels|ssm_.*multiplier|"
    r"max_window_layers|sliding_window(_pattern|_size)|use_sliding_window|^qk_(nope_)?head_dim|swa_num_attention_heads|"
    r"layernorm_linear|residual_in_fp32|_(alpha|beta)_factor|use_prefill_window|^attn_window"
)
"""Fields that match and change nothing about what is kept, or only where another field says that they count."""


def read_layers(reader: ConfigReader, context: int, state_dtype: DType | None) -> tuple[Layer, ...]:
    """What every layer keeps, in order. Raises UnsupportedModel."""
    _refuse_other_shapes(reader)
    if compressed.applies(reader):
        layers: tuple[Layer, ...] = compressed.read(reader)
    else:
        kinds = layer_kinds(reader)
        layers = _mixed_layers(reader, kinds, context, state_dtype)
    _refuse_unread(reader)
    return layers


def read_drafts(reader: ConfigReader, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers of the model's own multi-token prediction; empty where the configuration has none.

    Each is one full attention like the model's own, with an indexer of its own where the model has indexers.
    """
    count = reader.size(
        "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_transformer_layers", default=0
    )
    if not count:
        return ()
    if compressed.applies(reader):
        return compressed.read_drafts(reader, count)
    return (draft_like(layers),) * count if draft_like(layers) else ()


def draft_like(layers: tuple[Layer, ...]) -> Layer:
    """One draft layer with the shapes of the model's last full attention, else its last attention; () without any."""
    calls = [call for layer in layers for call in layer if isinstance(call, (AttentionCall, LatentCall))]
    full = [call for call in calls if not (isinstance(call, AttentionCall) and call.window)]
    if not calls:
        compressed_calls = [call for layer in layers for call in layer if isinstance(call, CompressedCall)]
        return tuple(compressed_calls[-1:])
    last = (full or calls)[-1]
    if isinstance(last, LatentCall) and last.sparse and not last.index_dim:
        last = next(call for call in calls if isinstance(call, LatentCall) and call.index_dim)
    return (last,)


def _mixed_layers(reader: ConfigReader, kinds: list[str], context: int, state_dtype: DType | None) -> tuple[Layer, ...]:
    """Layers whose mixers are chosen one by one."""
    attend: Callable[[int, str], Layer]
    if latent.applies(reader):
        attend = latent.reader(reader, len(kinds))
    else:
        attend = attention.reader(reader, kinds, context)
    keeps_state = {STATE, PARALLEL} & set(kinds)
    kept: Layer = (state.read(reader, state_dtype),) if keeps_state else ()
    layers: list[Layer] = []
    for index, kind in enumerate(kinds):
        if kind == NOTHING:
            layers.append(())
        elif kind == STATE:
            layers.append(kept)
        elif kind == PARALLEL:
            layers.append(attend(index, FULL) + kept)
        else:
            layers.append(attend(index, kind))
    return tuple(layers)


_OTHER_CALLS = frozenset({"diffllama", "hrm_text", "longcat_flash", "mllama"})
"""Model types whose layers call attention in a number or with shapes that no field of the configuration says."""


def _refuse_other_shapes(reader: ConfigReader) -> None:
    if reader.get("is_encoder_decoder"):
        raise reader.refusal("is an encoder-decoder", "is_encoder_decoder")
    if reader.kind in _OTHER_CALLS:
        raise reader.refusal("does not call attention exactly once per layer", "model_type")


def _refuse_unread(reader: ConfigReader) -> None:
    for name in reader.unread():
        if _UNKNOWN_MEMORY.search(name) and not _OF_NO_MATTER.search(name):
            raise reader.refusal(f"sets '{name}', which may change what a layer keeps and is not known here", name)
