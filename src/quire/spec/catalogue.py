"""Well-known open-weight models as data, so that a plan needs no download: short name, hub id and configuration.

A configuration holds the fields of the model's Hugging Face `config.json` that price its cache and its weights, under
their published names and with their published values. It holds no tokenizer, rope or training fields. Three things
are evened out: the language model's part of a wrapper is lifted to the top level, the element type is always called
`torch_dtype`, and it, `tie_word_embeddings` and the context length are written out where a file leaves them to the
model class. Where a checkpoint is published quantised, `quantization_config` keeps what says how many bits the
weights take. Entries share parts and are read-only: copy one deeply to alter it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.spec.bundled import BUNDLED_MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One model. `name` is short and lower case; `hub` is its Hugging Face id; `config` is read-only."""

    name: str
    hub: str
    config: Mapping[str, Any]


def catalogue_model(name: str) -> CatalogueModel | None:
    """The model with this short name or hub id, in any case; None where the catalogue has neither."""
    wanted = name.strip().lower()
    return CATALOGUE.get(wanted) or _BY_HUB.get(wanted)


def close_names(name: str) -> list[str]:
    """Up to three short names, or bundled models, similar to `name`, the closest first; empty where none is."""
    import difflib  # only a mistake needs it

    return difflib.get_close_matches(name.strip().lower(), [*CATALOGUE, *BUNDLED_MODELS], n=3)


Config = dict[str, Any]


def _config(
    name: str, kind: str, layers: int, hidden: int, heads: int, kv: int, context: int, vocab: int, /, **more: Any
) -> Config:
    """The fields nearly every model has, and those in `more`. `context` is in tokens."""
    common = {
        "architectures": [name],
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": context,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return common | more


def _sliding(layers: int, period: int) -> list[str]:
    """Layer kinds where every `period`-th layer reads everything and the others slide."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


_TIED: Config = {"tie_word_embeddings": True}
_HALF: Config = {"torch_dtype": "float16"}


def _fp8(**more: Any) -> Config:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]} | more}


def _packed4(kind: str, form: str) -> Config:
    """Routed experts in four bits of `kind` ("int" or "float"), 32 to a scale."""
    weights = {"num_bits": 4, "type": kind, "group_size": 32, "strategy": "group"}
    dense = r"mlp\.(gate|up|gate_up|down)_proj"
    rest = ["self_attn", "shared_experts", dense, "lm_head", "vision_tower", "mm_projector"]
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": [f"re:.*{name}.*" for name in rest],
        }
    }


# Below, every family takes its columns in one order: layers, hidden size, MLP size, heads, KV heads, context,
# vocabulary, then what is its own. A family whose models share a column leaves it out. Left to the formatter, most
# rows would take ten lines.
# fmt: off


def _llama(layers: int, hidden: int, mlp: int, heads: int, kv: int, context: int, vocab: int, **more: Any) -> Config:
    return _config("LlamaForCausalLM", "llama", layers, hidden, heads, kv, context, vocab,
                   intermediate_size=mlp, **more)


def _llama4(context: int, experts: int, every: int) -> Config:
    return _config("Llama4ForConditionalGeneration", "llama4_text", 48, 5120, 40, 8, context, 202048,
                   head_dim=128, intermediate_size=8192, intermediate_size_mlp=16384, attention_chunk_size=8192,
                   num_local_experts=experts, num_experts_per_tok=1, interleave_moe_layer_step=every)


def _mistral(layers: int, hidden: int, mlp: int, heads: int, context: int, vocab: int, **more: Any) -> Config:
    return _config("MistralForCausalLM", "mistral", layers, hidden, heads, 8, context, vocab,
                   **{"intermediate_size": mlp, "sliding_window": None} | more)


def _mixtral(layers: int, hidden: int, mlp: int, heads: int, context: int) -> Config:
    return _config("MixtralForCausalLM", "mixtral", layers, hidden, heads, 8, context, 32000,
                   intermediate_size=mlp, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)


def _qwen2(layers: int, hidden: int, mlp: int, heads: int, kv: int, context: int, vocab: int,
           window: int, first: int, **more: Any) -> Config:
    return _config("Qwen2ForCausalLM", "qwen2", layers, hidden, heads, kv, context, vocab, intermediate_size=mlp,
                   use_sliding_window=False, sliding_window=window, max_window_layers=first, **more)


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, **more: Any) -> Config:
    return _config("Qwen3ForCausalLM", "qwen3", layers, hidden, heads, 8, 40960, 151936, head_dim=128,
                   intermediate_size=mlp, use_sliding_window=False, sliding_window=None, **more)


def _qwen3_moe(layers: int, hidden: int, mlp: int, heads: int, kv: int, context: int,
               experts: int, expert: int) -> Config:
    return _config("Qwen3MoeForCausalLM", "qwen3_moe", layers, hidden, heads, kv, context, 151936, head_dim=128,
                   intermediate_size=mlp, use_sliding_window=False, sliding_window=None, num_experts=experts,
                   num_experts_per_tok=8, moe_intermediate_size=expert, decoder_sparse_step=1, mlp_only_layers=[])


def _delta(layers: int, value_heads: int) -> Config:
    """Three gated-delta layers before each attention layer."""
    return {"head_dim": 256, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
            "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 16, "linear_key_head_dim": 128,
            "linear_num_value_heads": value_heads, "linear_value_head_dim": 128}


_QWEN35: Config = {"attn_output_gate": True, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}


def _qwen35(layers: int, hidden: int, mlp: int, heads: int, value_heads: int, **more: Any) -> Config:
    return _config("Qwen3_5ForConditionalGeneration", "qwen3_5_text", layers, hidden, heads, 4, 262144, 248320,
                   intermediate_size=mlp, **_delta(layers, value_heads), **_QWEN35, **more)


def _qwen35_moe(layers: int, hidden: int, expert: int, heads: int, value_heads: int,
                experts: int, active: int) -> Config:
    return _config("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", layers, hidden, heads, 2, 262144, 248320,
                   num_experts=experts, num_experts_per_tok=active, moe_intermediate_size=expert,
                   shared_expert_intermediate_size=expert, **_delta(layers, value_heads), **_QWEN35)


def _gemma2(layers: int, hidden: int, mlp: int, heads: int, kv: int, head_dim: int) -> Config:
    return _config("Gemma2ForCausalLM", "gemma2", layers, hidden, heads, kv, 8192, 256000,
                   intermediate_size=mlp, head_dim=head_dim, sliding_window=4096, **_TIED)


def _gemma3(layers: int, hidden: int, mlp: int, heads: int, kv: int, head_dim: int) -> Config:
    return _config("Gemma3ForConditionalGeneration", "gemma3_text", layers, hidden, heads, kv, 131072, 262208,
                   intermediate_size=mlp, head_dim=head_dim, sliding_window=1024,
                   layer_types=_sliding(layers, 6), **_TIED)


def _gemma4(layers: int, hidden: int, mlp: int, heads: int, kv: int, global_kv: int, **more: Any) -> Config:
    return _config("Gemma4ForConditionalGeneration", "gemma4_text", layers, hidden, heads, kv, 262144, 262144,
                   intermediate_size=mlp, head_dim=256, global_head_dim=512, num_global_key_value_heads=global_kv,
                   attention_k_eq_v=True, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
                   use_double_wide_mlp=False, sliding_window=1024, layer_types=_sliding(layers, 6), **_TIED, **more)


def _gpt_oss(layers: int, experts: int) -> Config:
    rest = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _config("GptOssForCausalLM", "gpt_oss", layers, 2880, 64, 8, 131072, 201088, head_dim=64,
                   intermediate_size=2880, num_local_experts=experts, num_experts_per_tok=4,
                   sliding_window=128, layer_types=_sliding(layers, 2),
                   quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": rest})


def _phi3(layers: int, hidden: int, mlp: int, heads: int, kv: int, context: int, vocab: int,
          window: int | None) -> Config:
    return _config("Phi3ForCausalLM", "phi3", layers, hidden, heads, kv, context, vocab,
                   intermediate_size=mlp, sliding_window=window)


def _cohere(layers: int, hidden: int, mlp: int, heads: int, kv: int) -> Config:
    return _config("CohereForCausalLM", "cohere", layers, hidden, heads, kv, 8192, 256000,
                   intermediate_size=mlp, model_max_length=131072, **_TIED, **_HALF)


def _latent(q_rank: int | None, nope: int = 128, value: int = 128) -> Config:
    return {"kv_lora_rank": 512, "q_lora_rank": q_rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": 64,
            "v_head_dim": value}


def _experts(routed: int, active: int, expert: int, shared: int, dense: int) -> Config:
    """Mixture-of-experts fields in DeepSeek's words; the first `dense` layers have a plain MLP."""
    return {"n_routed_experts": routed, "num_experts_per_tok": active, "moe_intermediate_size": expert,
            "n_shared_experts": shared, "first_k_dense_replace": dense}


def _deepseek2(layers: int, hidden: int, mlp: int, heads: int, q_rank: int | None, *experts: int) -> Config:
    return _config("DeepseekV2ForCausalLM", "deepseek_v2", layers, hidden, heads, heads, 163840, 102400,
                   intermediate_size=mlp, moe_layer_freq=1, **_latent(q_rank), **_experts(*experts))


def _deepseek3(architecture: str, kind: str, **more: Any) -> Config:
    return _config(architecture, kind, 61, 7168, 128, 128, 163840, 129280, intermediate_size=18432, moe_layer_freq=1,
                   num_nextn_predict_layers=1, **_latent(1536), **_experts(256, 8, 2048, 1, 3), **_fp8(), **more)


def _deepseek4(layers: int, hidden: int, expert: int, heads: int, experts: int,
               q_rank: int, groups: int, top: int, first: int) -> Config:
    # The last ratio is the draft layer's.
    ratios = [first] * 2 + [4, 128] * ((layers - 2) // 2) + [4] * (layers % 2) + [0]
    return _config("DeepseekV4ForCausalLM", "deepseek_v4", layers, hidden, heads, 1, 1048576, 129280, head_dim=512,
                   qk_rope_head_dim=64, q_lora_rank=q_rank, o_lora_rank=1024, o_groups=groups, sliding_window=128,
                   compress_ratios=ratios, index_n_heads=64, index_head_dim=128, index_topk=top,
                   n_routed_experts=experts, num_experts_per_tok=6, moe_intermediate_size=expert, n_shared_experts=1,
                   num_hash_layers=3, hc_mult=4, num_nextn_predict_layers=1, expert_dtype="fp4", **_fp8())


def _kimi_k2(architecture: str, kind: str, context: int, **quantization: Any) -> Config:
    return _config(architecture, kind, 61, 7168, 64, 64, context, 163840, intermediate_size=18432, moe_layer_freq=1,
                   num_nextn_predict_layers=0, **_latent(1536), **_experts(384, 8, 2048, 1, 1), **quantization)


def _kimi_linear(architecture: str, layers: int, hidden: int, mlp: int, heads: int, q_rank: int | None,
                 experts: int, active: int, expert: int, shared: int, **more: Any) -> Config:
    # Counted from 1, as the files do: every fourth layer attends, and the last.
    attends = [*range(4, layers, 4), layers]
    linear = {"num_heads": heads, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": attends,
              "kda_layers": [layer for layer in range(1, layers) if layer % 4]}
    return _config(architecture, "kimi_linear", layers, hidden, heads, heads, 1048576, 163840, intermediate_size=mlp,
                   linear_attn_config=linear, num_experts=experts, num_experts_per_token=active,
                   moe_intermediate_size=expert, num_shared_experts=shared, first_k_dense_replace=1,
                   moe_layer_freq=1, num_nextn_predict_layers=0, **_latent(q_rank), **more)


def _glm4(layers: int, hidden: int, mlp: int, norm: bool, *experts: int) -> Config:
    return _config("Glm4MoeForCausalLM", "glm4_moe", layers, hidden, 96, 8, 131072, 151552, head_dim=128,
                   intermediate_size=mlp, attention_bias=True, use_qk_norm=norm, num_nextn_predict_layers=1,
                   **_experts(*experts))


def _glm5(context: int, head_dim: int, **more: Any) -> Config:
    return _config("GlmMoeDsaForCausalLM", "glm_moe_dsa", 78, 6144, 64, 64, context, 154880, head_dim=head_dim,
                   qk_head_dim=256, intermediate_size=12288, moe_layer_freq=1, index_n_heads=32, index_head_dim=128,
                   index_topk=2048, num_nextn_predict_layers=1, **_latent(2048, 192, 256),
                   **_experts(256, 8, 2048, 1, 3), **more)


_H8 = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
_H56 = "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"
_NANO = "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME"
_SUPER = "MEMEMEM*E" * 3 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"
_ULTRA = "MEMEMEM*E" + ("MEMEM*E" + "MEMEMEM*E" * 2) * 3 + "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME"
_BLOCKS = {"M": "mamba", "E": "moe", "*": "attention"}


def _nemotron_h(pattern: str, hidden: int, mlp: int, heads: int, kv: int, context: int,
                mamba_heads: int, state: int, **more: Any) -> Config:
    return _config("NemotronHForCausalLM", "nemotron_h", len(pattern), hidden, heads, kv, context, 131072,
                   hybrid_override_pattern=pattern, intermediate_size=mlp, sliding_window=None, conv_kernel=4,
                   mamba_num_heads=mamba_heads, mamba_head_dim=64, ssm_state_size=state, n_groups=8, expand=2, **more)


def _nemotron3(pattern: str, hidden: int, expert: int, heads: int, mamba_heads: int,
               experts: int, active: int, **more: Any) -> Config:
    return _nemotron_h(pattern, hidden, expert, heads, 2, 262144, mamba_heads, 128, head_dim=128,
                       n_routed_experts=experts, num_experts_per_tok=active, moe_intermediate_size=expert,
                       n_shared_experts=1, moe_shared_expert_intermediate_size=2 * expert,
                       mamba_ssm_cache_dtype="float32", **more)


def _listed(config: Config) -> Config:
    """As newer files write it: the layers are listed by name, and their number is left to the list."""
    pattern = config.pop("hybrid_override_pattern")
    del config["num_hidden_layers"]
    return config | {"layers_block_type": [_BLOCKS[block] for block in pattern]}


def _searched(*runs: tuple[int, bool, float]) -> list[Config]:
    """Blocks found by architecture search, as runs: how many, whether they attend, MLP width over hidden size."""
    return [{"attention": {"n_heads_in_group": 8 if attends else None, "no_op": not attends},
             "ffn": {"ffn_mult": width, "no_op": False}} for count, attends, width in runs for _ in range(count)]


_SUPER_49B = _searched(
    (1, True, 2.625), (5, True, 5.25), (2, False, 2.625), (3, True, 5.25), (1, False, 3.28125), (30, True, 5.25),
    (1, False, 1.3125), (2, False, 2.625), (1, False, 1.3125), (1, False, 5.25), (1, False, 1.3125), (1, False, 2.625),
    (3, False, 1.3125), (1, True, 5.25), (1, False, 1.3125), (2, False, 1.0), (1, False, 1.3125), (3, False, 1.0),
    (2, False, 1.3125), (2, False, 0.5), (2, False, 1.0), (2, False, 0.5), (1, False, 1.0), (2, False, 0.5),
    (9, True, 5.25),
)


def _jamba(layers: int, hidden: int, mlp: int, heads: int, dt_rank: int) -> Config:
    return _config("JambaForCausalLM", "jamba", layers, hidden, heads, 8, 262144, 65536, intermediate_size=mlp,
                   attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2, expert_layer_offset=1,
                   num_experts=16, num_experts_per_tok=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
                   mamba_dt_rank=dt_rank, sliding_window=None)


def _mamba2(heads: int, head_dim: int, state: int, groups: int = 1) -> Config:
    return {"mamba_n_heads": heads, "mamba_d_head": head_dim, "mamba_d_state": state, "mamba_n_groups": groups,
            "mamba_d_conv": 4, "mamba_expand": 2}


def _falcon_h1(layers: int, hidden: int, mlp: int, heads: int, kv: int, context: int, vocab: int,
               head_dim: int, inner: int, *mamba: int) -> Config:
    return _config("FalconH1ForCausalLM", "falcon_h1", layers, hidden, heads, kv, context, vocab, head_dim=head_dim,
                   intermediate_size=mlp, attn_layer_indices=None, mamba_d_ssm=inner, **_mamba2(*mamba))


def _granite4(hidden: int, expert: int, heads: int, kv: int,
              experts: int, active: int, shared: int, mamba_heads: int) -> Config:
    kinds = ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]
    return _config("GraniteMoeHybridForCausalLM", "granitemoehybrid", 40, hidden, heads, kv, 131072, 100352,
                   intermediate_size=expert, num_local_experts=experts, num_experts_per_tok=active,
                   shared_intermediate_size=shared, layer_types=kinds, **_mamba2(mamba_heads, 64, 128), **_TIED)


def _lfm2(hidden: int, mlp: int, heads: int) -> Config:
    attends = [2, 5, 8, 10, 12, 14]
    kinds = ["full_attention" if layer in attends else "conv" for layer in range(16)]
    return _config("Lfm2ForCausalLM", "lfm2", 16, hidden, heads, 8, 128000, 65536, conv_L_cache=3, conv_dim=hidden,
                   block_ff_dim=mlp, block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0,
                   block_multiple_of=256, full_attn_idxs=attends, layer_types=kinds, **_TIED)


def _olmo2(layers: int, hidden: int, mlp: int, heads: int, kv: int) -> Config:
    return _config("Olmo2ForCausalLM", "olmo2", layers, hidden, heads, kv, 4096, 100352, intermediate_size=mlp)


def _olmo3(layers: int, hidden: int, mlp: int, heads: int, kv: int) -> Config:
    return _config("Olmo3ForCausalLM", "olmo3", layers, hidden, heads, kv, 65536, 100278, intermediate_size=mlp,
                   sliding_window=4096, layer_types=_sliding(layers, 4))


_M3_SPARSE = [0] * 3 + [1] * 57

_MODELS: tuple[tuple[str, str, Config], ...] = (
    ("llama-2-7b", "meta-llama/Llama-2-7b-hf", _llama(32, 4096, 11008, 32, 32, 4096, 32000, **_HALF)),
    ("llama-2-13b", "meta-llama/Llama-2-13b-hf", _llama(40, 5120, 13824, 40, 40, 4096, 32000, **_HALF)),
    ("llama-2-70b", "meta-llama/Llama-2-70b-hf", _llama(80, 8192, 28672, 64, 8, 4096, 32000, **_HALF)),
    ("llama-3-8b", "meta-llama/Meta-Llama-3-8B-Instruct", _llama(32, 4096, 14336, 32, 8, 8192, 128256)),
    ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", _llama(32, 4096, 14336, 32, 8, 131072, 128256)),
    ("llama-3.1-70b", "meta-llama/Llama-3.1-70B-Instruct", _llama(80, 8192, 28672, 64, 8, 131072, 128256)),
    ("llama-3.1-405b", "meta-llama/Llama-3.1-405B-Instruct", _llama(126, 16384, 53248, 128, 8, 131072, 128256)),
    ("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", _llama(16, 2048, 8192, 32, 8, 131072, 128256, **_TIED)),
    ("llama-3.2-3b", "meta-llama/Llama-3.2-3B", _llama(28, 3072, 8192, 24, 8, 131072, 128256, **_TIED)),
    ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", _llama(80, 8192, 28672, 64, 8, 131072, 128256)),
    ("llama-4-scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct", _llama4(10485760, 16, 1)),
    ("llama-4-maverick", "meta-llama/Llama-4-Maverick-17B-128E-Instruct", _llama4(1048576, 128, 2)),
    ("yi-34b", "01-ai/Yi-34B", _llama(60, 7168, 20480, 56, 8, 4096, 64000)),
    ("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1", _mistral(32, 4096, 14336, 32, 32768, 32000, sliding_window=4096)),
    ("mistral-7b-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", _mistral(32, 4096, 14336, 32, 32768, 32768)),
    ("mistral-nemo-12b", "mistralai/Mistral-Nemo-Instruct-2407",
     _mistral(40, 5120, 14336, 32, 131072, 131072, head_dim=128)),
    ("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501",
     _mistral(40, 5120, 32768, 32, 32768, 131072, head_dim=128)),
    ("mistral-large-123b", "mistralai/Mistral-Large-Instruct-2407", _mistral(88, 12288, 28672, 96, 131072, 32768)),
    ("devstral-2-123b", "mistralai/Devstral-2-123B-Instruct",
     _config("Ministral3ForCausalLM", "ministral3", 88, 12288, 96, 8, 262144, 131072, head_dim=128,
             intermediate_size=28672, sliding_window=None, **_fp8(weight_block_size=None, modules_to_not_convert=[
                 "model.vision_tower", "model.multi_modal_projector", "lm_head"]))),
    ("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1", _mixtral(32, 4096, 14336, 32, 32768)),
    ("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", _mixtral(56, 6144, 16384, 48, 65536)),
    ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct",
     _qwen2(24, 896, 4864, 14, 2, 32768, 151936, 32768, 21, **_TIED)),
    ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", _qwen2(28, 1536, 8960, 12, 2, 131072, 151936, 131072, 28, **_TIED)),
    ("qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", _qwen2(36, 2048, 11008, 16, 2, 32768, 151936, 32768, 70, **_TIED)),
    ("qwen2.5-7b", "Qwen/Qwen2.5-7B", _qwen2(28, 3584, 18944, 28, 4, 131072, 152064, 131072, 28)),
    ("qwen2.5-14b", "Qwen/Qwen2.5-14B-Instruct", _qwen2(48, 5120, 13824, 40, 8, 32768, 152064, 131072, 70)),
    ("qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct", _qwen2(64, 5120, 27648, 40, 8, 32768, 152064, 131072, 70)),
    ("qwen2.5-72b", "Qwen/Qwen2.5-72B-Instruct", _qwen2(80, 8192, 29568, 64, 8, 32768, 152064, 131072, 70)),
    ("qwq-32b", "Qwen/QwQ-32B", _qwen2(64, 5120, 27648, 40, 8, 40960, 152064, 32768, 64)),
    ("qwen3-0.6b", "Qwen/Qwen3-0.6B", _qwen3(28, 1024, 3072, 16, **_TIED)),
    ("qwen3-1.7b", "Qwen/Qwen3-1.7B", _qwen3(28, 2048, 6144, 16, **_TIED)),
    ("qwen3-4b", "Qwen/Qwen3-4B", _qwen3(36, 2560, 9728, 32, **_TIED)),
    ("qwen3-8b", "Qwen/Qwen3-8B", _qwen3(36, 4096, 12288, 32)),
    ("qwen3-14b", "Qwen/Qwen3-14B", _qwen3(40, 5120, 17408, 40)),
    ("qwen3-32b", "Qwen/Qwen3-32B", _qwen3(64, 5120, 25600, 64)),
    ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", _qwen3_moe(48, 2048, 6144, 32, 4, 40960, 128, 768)),
    ("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", _qwen3_moe(94, 4096, 12288, 64, 4, 40960, 128, 1536)),
    ("qwen3-coder-480b-a35b", "Qwen/Qwen3-Coder-480B-A35B-Instruct",
     _qwen3_moe(62, 6144, 8192, 96, 8, 262144, 160, 2560)),
    ("qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct",
     _config("Qwen3NextForCausalLM", "qwen3_next", 48, 2048, 16, 2, 262144, 151936, intermediate_size=5120,
             num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
             decoder_sparse_step=1, mlp_only_layers=[], **_delta(48, 32))),
    ("qwen3.5-4b", "Qwen/Qwen3.5-4B", _qwen35(32, 2560, 9216, 16, 32, **_TIED)),
    ("qwen3.5-9b", "Qwen/Qwen3.5-9B", _qwen35(32, 4096, 12288, 16, 32)),
    ("qwen3.5-27b", "Qwen/Qwen3.5-27B", _qwen35(64, 5120, 17408, 24, 48)),
    ("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", _qwen35_moe(40, 2048, 512, 16, 32, 256, 8)),
    ("qwen3.5-122b-a10b", "Qwen/Qwen3.5-122B-A10B", _qwen35_moe(48, 3072, 1024, 32, 64, 256, 8)),
    ("qwen3.5-397b-a17b", "Qwen/Qwen3.5-397B-A17B", _qwen35_moe(60, 4096, 1024, 32, 64, 512, 10)),
    ("gemma-2-2b", "google/gemma-2-2b-it", _gemma2(26, 2304, 9216, 8, 4, 256)),
    ("gemma-2-9b", "google/gemma-2-9b-it", _gemma2(42, 3584, 14336, 16, 8, 256)),
    ("gemma-2-27b", "google/gemma-2-27b-it", _gemma2(46, 4608, 36864, 32, 16, 128)),
    ("gemma-3-1b", "google/gemma-3-1b-it",
     _config("Gemma3ForCausalLM", "gemma3_text", 26, 1152, 4, 1, 32768, 262144, intermediate_size=6912, head_dim=256,
             sliding_window=512, sliding_window_pattern=6, **_TIED)),
    ("gemma-3-4b", "google/gemma-3-4b-it", _gemma3(34, 2560, 10240, 8, 4, 256)),
    ("gemma-3-12b", "google/gemma-3-12b-it", _gemma3(48, 3840, 15360, 16, 8, 256)),
    ("gemma-3-27b", "google/gemma-3-27b-it", _gemma3(62, 5376, 21504, 32, 16, 128)),
    ("gemma-4-26b-a4b", "google/gemma-4-26B-A4B",
     _gemma4(30, 2816, 2112, 16, 8, 2, enable_moe_block=True, num_experts=128, top_k_experts=8,
             moe_intermediate_size=704)),
    ("gemma-4-31b", "google/gemma-4-31B", _gemma4(60, 5376, 21504, 32, 16, 4, enable_moe_block=False)),
    ("gpt-oss-20b", "openai/gpt-oss-20b", _gpt_oss(24, 32)),
    ("gpt-oss-120b", "openai/gpt-oss-120b", _gpt_oss(36, 128)),
    # The only file here that has its own names for the common fields.
    ("gpt2", "openai-community/gpt2",
     {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
      "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257, "torch_dtype": "float32", **_TIED}),
    ("phi-3-mini", "microsoft/Phi-3-mini-4k-instruct", _phi3(32, 3072, 8192, 32, 32, 4096, 32064, 2047)),
    ("phi-4", "microsoft/phi-4", _phi3(40, 5120, 17920, 40, 10, 16384, 100352, None)),
    ("command-r", "CohereLabs/c4ai-command-r-v01", _cohere(40, 8192, 22528, 64, 64)),
    ("command-r-plus", "CohereLabs/c4ai-command-r-plus", _cohere(64, 12288, 33792, 96, 8)),
    ("command-r7b", "CohereLabs/c4ai-command-r7b-12-2024",
     _config("Cohere2ForCausalLM", "cohere2", 32, 4096, 32, 8, 132096, 256000, head_dim=128, intermediate_size=14336,
             sliding_window=4096, sliding_window_pattern=4, **_TIED)),
    ("deepseek-v2", "deepseek-ai/DeepSeek-V2", _deepseek2(60, 5120, 12288, 128, 1536, 160, 6, 1536, 2, 1)),
    ("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", _deepseek2(27, 2048, 10944, 16, None, 64, 6, 1408, 2, 1)),
    ("deepseek-v3", "deepseek-ai/DeepSeek-V3", _deepseek3("DeepseekV3ForCausalLM", "deepseek_v3")),
    ("deepseek-r1", "deepseek-ai/DeepSeek-R1", _deepseek3("DeepseekV3ForCausalLM", "deepseek_v3")),
    ("deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2",
     _deepseek3("DeepseekV32ForCausalLM", "deepseek_v32", index_n_heads=64, index_head_dim=128, index_topk=2048)),
    ("deepseek-v4-flash", "deepseek-ai/DeepSeek-V4-Flash", _deepseek4(43, 4096, 2048, 64, 256, 1024, 8, 512, 0)),
    ("deepseek-v4-pro", "deepseek-ai/DeepSeek-V4-Pro", _deepseek4(61, 7168, 3072, 128, 384, 1536, 16, 1024, 128)),
    ("kimi-k2", "moonshotai/Kimi-K2-Instruct", _kimi_k2("DeepseekV3ForCausalLM", "kimi_k2", 131072, **_fp8())),
    ("kimi-k2.5", "moonshotai/Kimi-K2.5",
     _kimi_k2("KimiK25ForConditionalGeneration", "deepseek_v3", 262144, **_packed4("int", "pack-quantized"))),
    ("kimi-k3", "moonshotai/Kimi-K3",
     _kimi_linear("KimiK3ForConditionalGeneration", 93, 7168, 33792, 96, 1536, 896, 16, 3072, 2,
                  routed_expert_hidden_size=3584, **_packed4("float", "mxfp4-pack-quantized"))),
    ("kimi-linear-48b-a3b", "moonshotai/Kimi-Linear-48B-A3B-Instruct",
     _kimi_linear("KimiLinearForCausalLM", 27, 2304, 9216, 32, None, 256, 8, 1024, 1, head_dim=72,
                  model_max_length=1048576)),
    ("glm-4.5", "zai-org/GLM-4.5", _glm4(92, 5120, 12288, True, 160, 8, 1536, 1, 3)),
    ("glm-4.5-air", "zai-org/GLM-4.5-Air", _glm4(46, 4096, 10944, False, 128, 8, 1408, 1, 1)),
    ("glm-5.1", "zai-org/GLM-5.1", _glm5(202752, 64)),
    ("glm-5.2", "zai-org/GLM-5.2",
     _glm5(1048576, 192, index_topk_freq=4, index_skip_topk_offset=3, index_share_for_mtp_iteration=True,
           indexer_types=["full"] * 2 + (["full"] + ["shared"] * 3) * 19)),
    ("minimax-m1", "MiniMaxAI/MiniMax-M1-80k",
     _config("MiniMaxM1ForCausalLM", "minimax_m1", 80, 6144, 64, 8, 10240000, 200064, head_dim=128,
             intermediate_size=9216, num_local_experts=32, num_experts_per_tok=2, shared_intermediate_size=0,
             sliding_window=None, attn_type_list=([0] * 7 + [1]) * 10)),
    ("minimax-m2.5", "MiniMaxAI/MiniMax-M2.5",
     _config("MiniMaxM2ForCausalLM", "minimax_m2", 62, 3072, 48, 8, 196608, 200064, head_dim=128,
             intermediate_size=1536, num_local_experts=256, num_experts_per_tok=8, shared_intermediate_size=0,
             use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1,
             **_fp8(modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"]))),
    ("minimax-m3", "MiniMaxAI/MiniMax-M3",
     _config("MiniMaxM3ForCausalLM", "minimax_m3", 60, 6144, 64, 4, 1048576, 200064, head_dim=128,
             intermediate_size=3072, dense_intermediate_size=12288, moe_intermediate_size=3072,
             shared_intermediate_size=3072, num_local_experts=128, num_experts_per_tok=4, n_shared_experts=1,
             first_k_dense_replace=3, moe_layer_freq=_M3_SPARSE, num_nextn_predict_layers=1, num_mtp_modules=7,
             sparse_attention_config={
                 "use_sparse_attention": True, "sparse_attention_freq": _M3_SPARSE, "sparse_num_index_heads": 4,
                 "sparse_index_dim": 128, "sparse_disable_index_value": _M3_SPARSE, "sparse_block_size": 128,
                 "sparse_topk_blocks": 16, "sparse_init_block": 0, "sparse_local_block": 1})),
    ("mimo-7b", "XiaomiMiMo/MiMo-7B-Base",
     _config("MiMoForCausalLM", "mimo", 36, 4096, 32, 8, 32768, 151680, head_dim=128, intermediate_size=11008,
             use_sliding_window=False, sliding_window=32768, max_window_layers=32, num_nextn_predict_layers=1)),
    ("mimo-v2-flash", "XiaomiMiMo/MiMo-V2-Flash",
     _config("MiMoV2FlashForCausalLM", "mimo_v2_flash", 48, 4096, 64, 4, 262144, 152576, head_dim=192, v_head_dim=128,
             swa_num_attention_heads=64, swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128,
             hybrid_layer_pattern=[0] + [1] * 4 + ([0] + [1] * 5) * 7 + [0], sliding_window=128,
             attention_chunk_size=128, intermediate_size=16384, n_routed_experts=256, n_shared_experts=None,
             num_experts_per_tok=8, moe_intermediate_size=2048, moe_layer_freq=[0] + [1] * 47, **_fp8())),
    ("nemotron-h-8b", "nvidia/Nemotron-H-8B-Base-8K",
     _nemotron_h(_H8, 4096, 21504, 32, 8, 8192, 128, 128, attention_head_dim=128)),
    ("nemotron-h-56b", "nvidia/Nemotron-H-56B-Base-8K",
     _nemotron_h(_H56, 8192, 32768, 64, 8, 8192, 256, 256, attention_head_dim=128)),
    ("nemotron-3-nano-30b-a3b", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
     _nemotron3(_NANO, 2688, 1856, 32, 64, 128, 6)),
    ("nemotron-3-super-120b-a12b", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
     _nemotron3(_SUPER, 4096, 2688, 32, 128, 512, 22, moe_latent_size=1024, num_nextn_predict_layers=1,
                mtp_hybrid_override_pattern="*E")),
    ("nemotron-3-ultra-550b-a55b", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
     _listed(_nemotron3(_ULTRA, 8192, 5120, 64, 256, 512, 22, moe_latent_size=2048, num_nextn_predict_layers=1,
                        mtp_layers_block_type=["attention", "moe"]))),
    # The searched blocks say what each layer has; the file gives no MLP size and no number of KV heads.
    ("llama-3.3-nemotron-super-49b", "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
     {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "num_hidden_layers": 80,
      "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": None, "intermediate_size": None,
      "max_position_embeddings": 131072, "vocab_size": 128256, "tie_word_embeddings": False,
      "torch_dtype": "bfloat16", "block_configs": _SUPER_49B}),
    ("jamba-1.5-mini", "ai21labs/AI21-Jamba-1.5-Mini", _jamba(32, 4096, 14336, 32, 256)),
    ("jamba-1.5-large", "ai21labs/AI21-Jamba-1.5-Large", _jamba(72, 8192, 24576, 64, 512)),
    ("falcon-h1-0.5b", "tiiuae/Falcon-H1-0.5B-Instruct",
     _falcon_h1(36, 1024, 2048, 8, 2, 16384, 32784, 64, 1536, 24, 64, 128)),
    ("falcon-h1-7b", "tiiuae/Falcon-H1-7B-Instruct",
     _falcon_h1(44, 3072, 12288, 12, 2, 262144, 130048, 128, 3072, 24, 128, 256)),
    ("falcon-h1-34b", "tiiuae/Falcon-H1-34B-Instruct",
     _falcon_h1(72, 5120, 21504, 20, 4, 262144, 261120, 128, 4096, 32, 128, 256, 2)),
    ("granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-tiny", _granite4(1536, 512, 12, 4, 64, 6, 1024, 48)),
    ("granite-4.0-h-small", "ibm-granite/granite-4.0-h-small", _granite4(4096, 768, 32, 8, 72, 10, 1536, 128)),
    ("lfm2-350m", "LiquidAI/LFM2-350M", _lfm2(1024, 6656, 16)),
    ("lfm2-700m", "LiquidAI/LFM2-700M", _lfm2(1536, 10240, 24)),
    ("lfm2-1.2b", "LiquidAI/LFM2-1.2B", _lfm2(2048, 12288, 32)),
    ("olmo-2-7b", "allenai/OLMo-2-1124-7B-Instruct", _olmo2(32, 4096, 11008, 32, 32)),
    ("olmo-2-13b", "allenai/OLMo-2-1124-13B-Instruct", _olmo2(40, 5120, 13824, 40, 40)),
    ("olmo-2-32b", "allenai/OLMo-2-0325-32B-Instruct", _olmo2(64, 5120, 27648, 40, 8)),
    ("olmo-3-7b", "allenai/Olmo-3-7B-Instruct", _olmo3(32, 4096, 11008, 32, 32)),
    ("olmo-3.1-32b", "allenai/Olmo-3.1-32B-Instruct", _olmo3(64, 5120, 27648, 40, 8)),
    ("exaone-4.0-32b", "LGAI-EXAONE/EXAONE-4.0-32B",
     _config("Exaone4ForCausalLM", "exaone4", 64, 5120, 40, 8, 131072, 102400, head_dim=128, intermediate_size=27392,
             sliding_window=4096, sliding_window_pattern="LLLG", layer_types=_sliding(64, 4))),
    ("smollm3-3b", "HuggingFaceTB/SmolLM3-3B",
     _config("SmolLM3ForCausalLM", "smollm3", 36, 2048, 16, 4, 65536, 128256, intermediate_size=11008,
             use_sliding_window=False, sliding_window=None, layer_types=["full_attention"] * 36, **_TIED)),
    ("starcoder2-15b", "bigcode/starcoder2-15b",
     _config("Starcoder2ForCausalLM", "starcoder2", 40, 6144, 48, 4, 16384, 49152, intermediate_size=24576,
             sliding_window=4096, use_bias=True, torch_dtype="float32")),
    ("internlm2.5-7b", "internlm/internlm2_5-7b-chat",
     _config("InternLM2ForCausalLM", "internlm2", 32, 4096, 32, 8, 32768, 92544, intermediate_size=14336)),
    ("step-3.7-flash", "stepfun-ai/Step-3.7-Flash-FP8",
     _config("Step3p7FlashForCausalLM", "step3p7", 45, 4096, 64, 8, 65536, 128896, head_dim=128,
             intermediate_size=11264, sliding_window=512,
             layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
             num_experts=288, num_experts_per_tok=8, moe_intermediate_size=1280, share_expert_dim=1280,
             n_shared_experts=1, first_k_dense_replace=3, num_nextn_predict_layers=3, **_fp8())),
    ("ling-plus", "inclusionAI/Ling-plus",
     _config("BailingMoeForCausalLM", "bailing_moe", 88, 5376, 56, 8, 16384, 126464, intermediate_size=12288,
             num_experts=64, num_experts_per_tok=4, moe_intermediate_size=3072, num_shared_experts=1,
             first_k_dense_replace=0)),
)
# fmt: on

CATALOGUE: Mapping[str, CatalogueModel] = MappingProxyType(
    {name: CatalogueModel(name=name, hub=hub, config=config) for name, hub, config in _MODELS}
)
"""Every model, by short name."""

_BY_HUB: Mapping[str, CatalogueModel] = {model.hub.lower(): model for model in CATALOGUE.values()}
