"""From a configuration to layers: the mixer of each layer, and what that stores. One file per kind of mixer."""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.spec.config_reader import CONVENTIONS, ConfigReader
from quire.spec.families import attention, latent, state
from quire.spec.families.kinds import FULL, MOST_LAYERS, NOTHING, PARALLEL, STATE, layer_kinds
from quire.spec.layers import AttentionCall, Call, CompressedCall, LatentCall

Layer = tuple[Call, ...]
"""The calls of one layer that store data: usually one, none for a layer without attention, two for some hybrids."""

_ABOUT_MEMORY = re.compile(
    r"attn|attention|heads?(_|$)|head_(dim|size)|(^|_)kv|mixer|(^|_)states?(_|$)|conv|recur|ssm|mamba|linear|sparse|window"
    r"|chunk|lora_rank|block|index|compress|share|sharing|groups?(_|$)|(^|_)cla(_|$)|retention|rwkv|delta|lru_|layer_types"
    r"|per_layer|pattern|cross|local"
)
"""Names of fields that may affect the cache. If such a field is set and no reader has read it, the model is refused:
otherwise it would be priced as plain attention."""

_OF_NO_MATTER = re.compile(
    # how numbers are computed, not what is stored
    r"rope|rotary|norm|dropout|pdrop|_prob$|_bias$|_(eps|epsilon|theta|fp32|multipliers?|scale|factor|alpha|beta|scalar)$"
    r"|softcap|flash_att|upcast|activation|implementation|temperature|scale_attn|parallel_attn|output_gate|use_attention_gate|bidirectional"
    r"|attn_res_block|linear_(a_log|allow|dt|use_gate)|gated|swiglu|xavier|embedding_sharing|parallel_block|pre_allocate"
    # mixtures of experts, drafts, adapters, generation
    r"|expert|^moe_|^mlp_|^mtp_|moe_|^n_group$|topk_group|grouped_topk|^shared_(inter|moe)|decoder_sparse_step|adapter"
    r"|beam|compressor|classifier|ff_dim|ffn_dim|block_(dim|multiple|size)|auto_adjust|limited_groups"
    # query heads, which store nothing, and other names of fields that are read elsewhere
    r"|num_attention_heads|num_query_groups|attention_hidden_size|qk_(nope_)?head_dim|^o_(groups|lora_rank)|q_lora_rank"
    r"|hybrid_layer_ids|mem_blocks|conv_dim|index_(n_heads|share|skip|block|local|topk_)|max_window_layers"
    r"|sliding_window_(pattern|size)|use_sliding_window|full_attention_interval|full_attn_idxs|attn_every"
    r"|mamba_(proj|hidden|chunk|dt|act$|use_mlp)|use_mamba_kernels|^chunk_size|(vocab|hidden)_size_per_layer"
)
"""Fields whose names match and that do not affect the cache, or only together with another field."""


def read_layers(reader: ConfigReader, context: int) -> tuple[Layer, ...]:
    """The stored data of every layer, in order. Raises UnsupportedModel, also for unknown fields that may affect it."""
    _refuse_other_shapes(reader)
    layers = described_layers(reader, context)
    _refuse_unread(reader)
    return layers


def described_layers(reader: ConfigReader, context: int) -> tuple[Layer, ...]:
    """The stored data of every layer by the known fields, in order. Raises UnsupportedModel if they do not suffice."""
    if latent.keeps_compressed(reader):
        return latent.read_compressed(reader)
    return _mixed_layers(reader, layer_kinds(reader), context)


def read_drafts(reader: ConfigReader, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers of the model's own multi-token prediction; empty if the configuration has none.

    Each is one full attention like the model's own, with an indexer of its own if the model has indexers.
    """
    count = reader.num_draft_layers
    if count > MOST_LAYERS:
        raise reader.wrong("num_nextn_predict_layers", count, f"at most {MOST_LAYERS:,}")
    if latent.keeps_compressed(reader):
        return latent.read_compressed_drafts(reader, count)
    layer = draft_like(layers)
    return (layer,) * count if layer else ()


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


def _mixed_layers(reader: ConfigReader, kinds: list[str], context: int) -> tuple[Layer, ...]:
    """Layers whose mixers are chosen one by one."""
    attend: Callable[[int, str], Layer]
    if latent.applies(reader):
        attend = latent.reader(reader, len(kinds))
    else:
        attend = attention.reader(reader, kinds, context)
    kept: Layer = (state.read(reader)[1],) if {STATE, PARALLEL} & set(kinds) else ()

    def layer_of(index: int, kind: str) -> Layer:
        if kind == NOTHING:
            return ()
        if kind == STATE:
            return kept
        if kind != PARALLEL:
            return attend(index, kind)
        both = (attend(index, FULL), kept)
        return both[1] + both[0] if reader.implied.get("state_before_attention") else both[0] + both[1]

    return tuple(layer_of(index, kind) for index, kind in enumerate(kinds))


def _refuse_other_shapes(reader: ConfigReader) -> None:
    kind = reader.kind
    if reader.get("is_encoder_decoder"):
        raise reader.refusal("is an encoder-decoder", "is_encoder_decoder")
    if any(kind.endswith(name) or kind.startswith(f"{name}-") for name in CONVENTIONS["encoders"]):
        raise reader.refusal("is an encoder, or has one", "model_type")
    if reader.implied.get("attention_calls_vary"):
        raise reader.refusal("does not call attention exactly once per layer", "model_type")


def _refuse_unread(reader: ConfigReader) -> None:
    for name in reader.unread():
        if _ABOUT_MEMORY.search(name) and not _OF_NO_MATTER.search(name):
            raise reader.refusal(f"sets '{name}', which may change what a layer keeps and is not known here", name)
