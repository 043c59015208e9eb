"""Which model types are refused, as data. Loading checks every model anyway; this is known before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import UnsupportedModel

RECURRENT = "computes its recurrence in code of its own, which does not continue from a state held elsewhere"
CONVOLVED = "mixes keys and values of neighbouring tokens before attention, which this version does not hold"
BIASED = "adds a bias by distance to its attention, which paged attention does not see"
INDEXED = "selects tokens with an indexer of another kind, whose keys this version does not hold"
SLIDING_LATENTS = "slides windows over latents of another rank, which this version does not hold"
NO_LANGUAGE_MODEL = "has no causal language model in transformers, whose code Quire runs"
NO_INTERFACE = "computes attention in code of its own, which transformers does not let another implementation replace"
ENCODER = "is an encoder or encoder-decoder; Quire serves decoder-only language models"
OWN_MASK = "builds an attention mask of its own, which paged attention does not see"

_REFUSED = {
    RECURRENT: "rwkv xlstm",
    CONVOLVED: "zaya",
    BIASED: "inkling inkling2 inkling2_text inkling_text",
    INDEXED: "qwen4_exp qwen4_exp_text",
    SLIDING_LATENTS: "dots3_note dots3_note_text",
    NO_LANGUAGE_MODEL: "glm5_next mistral_large4",
    NO_INTERFACE: "bloom codegen cpmant falcon gpt_neo gpt_neox_japanese gptj mpt openai-gpt reformer xglm xlm xlnet",
    OWN_MASK: "doge",
    ENCODER: """
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra
        ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta roberta-prelayernorm roc_bert
        roformer t5 trocr whisper xlm-roberta xlm-roberta-xl xmod
    """,
}

REFUSED: Mapping[str, str] = {kind: reason for reason, kinds in _REFUSED.items() for kind in kinds.split()}
"""Model types that are refused, with the reason. The check at load decides for others."""

ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Types in published configurations that transformers does not know: the same architecture by another name."""


def refuse_unsupported(config: Mapping[str, Any], name: str) -> None:
    """Raise UnsupportedModel if the configuration `config` of model `name` is known not to run."""
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, Mapping) else (config,):
        kind = str(part.get("model_type"))
        reason = REFUSED.get(kind) or (ENCODER if part.get("is_encoder_decoder") else None)
        if reason:
            raise UnsupportedModel(
                f"model '{name}' is of type '{kind}', which {reason}.", fix="use a model type listed as verified."
            )
        quantised = part.get("quantization_config")
        if not isinstance(quantised, Mapping):
            continue
        method = quantised.get("quant_method") or quantised.get("quant_algo")
        if method and method != "mxfp4":  # which transformers itself expands
            raise UnsupportedModel(
                f"the weights of '{name}' are quantised ('{method}'), which this version does not compute with.",
                fix="use the model's float32, float16 or bfloat16 weights.",
            )
