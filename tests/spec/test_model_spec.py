"""ModelSpec read off configurations alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.errors import InvalidInput, UnsupportedModel
from quire.spec.layout import DType
from quire.spec.model import AttentionCall, ModelSpec
from tests.covering import each_of
from tests.tiny_hybrids import published

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def windows(**changes):
    return [call.window for call in ModelSpec.from_config({**LLAMA, "num_hidden_layers": 6, **changes}).calls]


def test_llama_3_8b():
    spec = ModelSpec.from_config(LLAMA)
    assert spec.architecture == "LlamaForCausalLM"
    assert spec.calls == (AttentionCall(kv_heads=8, key_dim=128, value_dim=128),) * 32
    assert (spec.context_length, spec.vocab_size, spec.dtype) == (131072, 128256, DType.BFLOAT16)
    (group,) = spec.groups(16)
    assert group.name == "full"
    assert group.layout.bytes_per_frame == 32 * 2 * 8 * 128 * 2 * 16
    assert [field.name for field in group.layout.fields] == ["k", "v"]


def test_calls_of_one_shape_share_a_field():
    wide, narrow = (
        AttentionCall(kv_heads=4, key_dim=16, value_dim=12),
        AttentionCall(kv_heads=2, key_dim=16, value_dim=12),
    )
    spec = ModelSpec(
        architecture="x", layers=((wide,), (narrow,), (wide,)), context_length=8, vocab_size=8, dtype=DType.FLOAT32
    )
    found = {(f.name, f.shape): f.layers for f in spec.groups(4)[0].layout.fields}
    assert found == {("k", (4, 16)): (0, 2), ("k", (2, 16)): (1,), ("v", (4, 12)): (0, 2), ("v", (2, 12)): (1,)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": None}, (32, 128)),
        ({"head_dim": 64}, (8, 64)),
        ({"multi_query": True}, (1, 128)),
        ({"hidden_size": None, "n_embd": 2048}, (8, 64)),
        ({"num_key_value_heads": [8] * 32}, (8, 128)),
    ],
)
def test_heads_and_dims(changes, expected):
    call = ModelSpec.from_config({**LLAMA, **changes}).calls[0]
    assert (call.kv_heads, call.key_dim) == expected


def test_the_text_part_of_a_wrapper():
    wrapper = {"architectures": ["Wrapper"], "model_type": "gemma3", "torch_dtype": "float16"}
    text = {key: value for key, value in LLAMA.items() if key not in ("architectures", "torch_dtype")}
    spec = ModelSpec.from_config({**wrapper, "text_config": text})
    assert (spec.architecture, spec.dtype, len(spec.calls)) == ("Wrapper", DType.FLOAT16, 32)


def test_no_dtype_is_float32():
    assert ModelSpec.from_config({**LLAMA, "torch_dtype": None}).dtype is DType.FLOAT32
    assert ModelSpec.from_config({**LLAMA, "torch_dtype": "torch.float16"}).dtype is DType.FLOAT16


def test_windows_by_layer_types():
    kinds = ["sliding_attention", "full_attention"] * 3
    assert windows(layer_types=kinds, sliding_window=512) == [512, 0] * 3
    assert windows(layer_types=["full_attention"] * 6, sliding_window=512) == [0] * 6


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral"}, [512] * 6),
        ({"model_type": "mistral", "sliding_window": None}, [0] * 6),
        ({"model_type": "mistral", "sliding_window": 131072}, [0] * 6),
        ({"model_type": "qwen2"}, [0] * 6),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4}, [0, 0, 0, 0, 512, 512]),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, [512] * 6),
        ({"model_type": "gemma2"}, [512, 0] * 3),
        ({"model_type": "gemma3_text"}, [512] * 5 + [0]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, [512, 512, 0] * 2),
    ],
)
def test_windows_by_convention(changes, expected):
    assert windows(**{"sliding_window": 512, **changes}) == expected


@each_of(
    ("changes", "said"),
    [
        ({"kv_lora_rank": 512}, "has no 'qk_rope_head_dim'"),
        ({"index_topk": 2048}, "sets 'index_topk'"),
        ({"mamba_d_state": 16}, "sets 'mamba_d_state'"),
        ({"state_size": 16}, "sets 'state_size'"),
        ({"linear_num_key_heads": 16}, "sets 'linear_num_key_heads'"),
        ({"attention_chunk_size": 8192}, "sets 'attention_chunk_size'"),
        ({"swa_num_key_value_heads": 8}, "sets 'swa_num_key_value_heads'"),
        ({"global_head_dim": 512}, "sets 'global_head_dim'"),
        ({"retention_heads": 4}, "sets 'retention_heads'"),
        ({"sparse_attention_config": {"kind": "odd"}}, "has no 'sparse_attention_config.sparse_index_dim'"),
        ({"layer_types": ["full_attention"] * 31 + ["warp_attention"]}, "layers of kind 'warp_attention'"),
        ({"block_configs": [{"attention": {"window_length": 8, "n_heads_in_group": 4}}] * 32}, "windowed attention"),
        ({"compress_ratios": [2] * 32, "head_dim": 512}, "compresses by a ratio other than"),
        ({"is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"layer_types": ["linear_attention"] * 32}, "has no 'mamba_num_heads'"),
        ({"model_type": "diffllama"}, "does not call attention exactly once per layer"),
        ({"sliding_window": 512}, "has a sliding window of 512 without 'layer_types'"),
        ({"num_hidden_layers": None}, "has no 'num_hidden_layers' (nor 'n_layer', 'n_layers', 'num_layers')"),
        ({"num_attention_heads": None}, "has no 'num_attention_heads'"),
        ({"hidden_size": 4097}, "has no 'head_dim'"),
        ({"max_position_embeddings": None}, "has no 'max_position_embeddings'"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
        ({"layer_types": ["full_attention"] * 3}, "names 3 layer_types for 32 layers"),
        ({"layer_types": ["sliding_attention"] * 32}, "has no 'sliding_window'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "has no 'max_window_layers'"),
        ({"torch_dtype": "float64"}, "dtype is 'float64'"),
    ],
)
def test_refuses_rather_than_guess(changes, said):
    with pytest.raises(UnsupportedModel) as caught:
        ModelSpec.from_config({**LLAMA, **changes})
    assert said in str(caught.value)


OF_CHECKPOINTS = {
    "bamba": {"attn_rotary_emb": 64},
    "cohere2": {"use_embedding_sharing": True, "use_parallel_block": True, "use_gated_activation": True},
    "falcon_h1": {"mamba_use_mlp": True},
    "gpt_bigcode": {"pre_allocate_kv_cache": True},
    "lfm2": {"block_dim": 64, "block_use_swiglu": True, "conv_dim_out": 64, "conv_use_xavier_init": True},
    "gpt2": {"reorder_and_upcast_attn": True},
    "qwen2": {"use_flash_attn": True},
    "olmo_hybrid": {"linear_use_gate": True},
    "recurrent_gemma": {"block_types": None, "_block_types": ["recurrent", "recurrent", "attention"]},
}
"""Fields of published configurations that transformers does not read, by a tiny model of their type."""


@pytest.mark.parametrize("name", OF_CHECKPOINTS)
def test_fields_of_published_checkpoints_are_known(name):
    plain = published(name)
    assert ModelSpec.from_config({**plain, **OF_CHECKPOINTS[name]}) == ModelSpec.from_config(plain)


def test_needs_neither_torch_nor_transformers():
    code = "import sys, quire.spec.model; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bounds_of_pages_are_stored_beside_plain_attention_alone():
    gemma = {
        **LLAMA,
        "num_hidden_layers": 2,
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    spec = ModelSpec.from_config(gemma)
    bounded = spec.with_page_bounds()
    assert [call.page_bounds for call in bounded.calls] == [False, True]
    full, bounds, window = bounded.groups(16)
    assert [group.name for group in (full, bounds, window)] == ["full", "indexer", "window"]
    assert (full, window) == spec.groups(16)
    assert [(field.name, field.layers, field.entries(16)) for field in bounds.layout.fields] == [
        ("key_min", (1,), 1),
        ("key_max", (1,), 1),
    ]
    assert bounds.layout.bytes_per_frame == full.layout.bytes_per_frame // 16
    for split in bounded.groups(16, tp=2)[1].layout.fields:
        assert split.shape == (4, 128)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 64, "model_type": "mistral"}, "no layer that reads everything"),
        ({"attention_chunk_size": 64, "model_type": "llama4_text"}, "chunked layers"),
    ],
)
def test_bounds_of_pages_are_refused_by_name(changes, reason):
    with pytest.raises(InvalidInput, match=reason):
        ModelSpec.from_config({**LLAMA, **changes}).with_page_bounds()
