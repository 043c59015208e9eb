"""How many bytes a model's weights use, estimated from its configuration: modules, parameters, bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.spec.config_reader import HIDDEN_SIZE, MODEL_DTYPE, ConfigReader, understood
from quire.spec.dtype import DType
from quire.spec.families import described_layers
from quire.spec.weights.bits import read_bits
from quire.spec.weights.estimate import WeightEstimate as WeightEstimate
from quire.spec.weights.modules import draft_layers, layer_weights, modules_of_layers

_GATED_TOWER = {"gemma4_vision", "pixtral", "qwen2_5_vl"}

_UNPRICED = {
    "H_cycles": "runs its layers several times",
    "cross_attention_layers": "attends to another model's output",
    "hidden_size_per_layer_input": "embeds every token once more per layer",
    "is_encoder_decoder": "is an encoder and a decoder",
    "layer_group_size": "mixes attention kinds by a rule of its own",
    "kv_channels": "has experts in its attention, or an MLP of half the stated width",
    "n_mamba_heads": "shares one attention among layers",
    "per_layer_config": "sizes single layers differently",
    "zero_expert_num": "has two attentions and two MLPs per layer",
}
_ANY_CONTEXT = 2**40  # tokens: windows stay windows, whatever the context of a server
_ONE_SIZE = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "num_experts")


def read_weights(config: ConfigReader, *, dtype: DType | None = None) -> WeightEstimate:
    """The estimate for a model. Weights that are not quantised are stored in `dtype`.

    `dtype` None: that of the configuration, by default bfloat16. Raises UnsupportedModel if the configuration does not
    determine the size, or only by unknown fields.
    """
    with understood(config.outer):
        odd = [name for name in _UNPRICED if config.has(name)]
        odd += [name for name in _ONE_SIZE if isinstance(config.get(name), Sequence)]
        if odd:
            raise config.unpriced(_UNPRICED.get(odd[0], _UNPRICED["per_layer_config"]), odd[0])
        plain = (dtype or config.dtype(*MODEL_DTYPE, default=DType.BFLOAT16)).itemsize * 8
        bits, hidden = read_bits(config, plain), config.size(*HIDDEN_SIZE)
        modules = modules_of_layers(config, described_layers(config, _ANY_CONTEXT))
        layers = tuple(layer_weights(config, layer, bits, [f"layers.{layer.index}"]) for layer in modules)
        if any(each.num_parameters < 0 for layer in layers for each in layer):
            raise config.unpriced("has sizes that do not go together", "hidden_size")
        embedding = config.size("vocab_size") * config.size("word_embed_proj_dim", default=hidden)
        learned = config.implied.get("learned_positions")
        positions = config.size("n_positions", "max_position_embeddings") if learned else 0
        is_tied = config.get("tie_word_embeddings", default=config.implied.get("tied_embeddings"))
        return WeightEstimate(
            embedding=embedding + positions * hidden,
            head=0 if is_tied or _generates_nothing(config.architecture) else embedding,
            layers=layers,
            draft_layers=tuple(draft_layers(config, modules, bits)),
            other=_tower(config),
            bits=plain,
        )


def active_parameters(config: ConfigReader, weights: WeightEstimate) -> int:
    """Parameters of a model that one token uses: of routed experts, the selected ones."""
    experts = config.size("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", default=0)
    chosen = config.size("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", default=experts)
    modules = (part for layer in weights.layers for part in layer)
    routed = sum(part.num_parameters for part in modules if part.module in ("experts", "experts_beside"))
    return weights.num_parameters - (routed - routed * chosen // experts if experts else 0)


def _generates_nothing(architecture: str) -> bool:
    """Whether a checkpoint of this name has no output layer: a decoder alone, or one that classifies."""
    alone = architecture.endswith("Model") and not architecture.endswith(("LMHeadModel", "ChatGLMModel"))
    return alone or architecture.endswith("ForSequenceClassification")


def _tower(config: ConfigReader) -> int:
    """Parameters of a vision tower and its projection, within 10 %; 0 if they are not described."""
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
    merged, out = (
        width * merge[0] ** 2,
        vision.size("out_hidden_size", "text_hidden_size", default=config.size(*HIDDEN_SIZE)),
    )
    num_mergers = 1 + len(described.get("deepstack_visual_indexes") or ())
    projection = num_mergers * merged * (merged + out) if merge[0] > 1 else width * out
    return layers + entries * width + projection if inner else 0
