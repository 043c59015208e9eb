"""Which fields of a layout are encoded, and how: numbers and scales that belong together, and no two formats alike."""

from __future__ import annotations

from typing import Any

import pytest

from quire.spec.kv_format import KV_FORMATS, KVFormat
from quire.spec.layers import AttentionCall, Call, CompressedCall, LatentCall, LayerField, StateCall, fp8_row
from quire.spec.layout import DType, scales_of
from quire.spec.model import ModelSpec
from tests.covering import each_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
CALLS: dict[str, Call] = {
    "heads": AttentionCall(kv_heads=2, key_dim=128, value_dim=64),
    "window": AttentionCall(kv_heads=2, key_dim=128, value_dim=128, window=64),
    "latent": LatentCall(rank=512, rope_dim=64),
    "sparse latent": LatentCall(rank=512, rope_dim=64, sparse=True, index_dim=128),
    "compressed": CompressedCall(nope_dim=448, rope_dim=64, window=128, ratio=4, overlap=True, index_dim=128),
    "state": StateCall(kernel=4, channels=8, heads=2, matrix=(4, 4)),
}
ROWS = ("auto", "fp8_e4m3")
"""What sparse and compressed latents can be stored as."""


def parts_of(call: Call, name: str) -> dict[str, LayerField]:
    kv_format = KV_FORMATS["bfloat16" if name == "auto" else name]
    return {part.name: part for part in call.parts(kv_format, DType.BFLOAT16)}


@each_of("kind", CALLS)
@each_of("name", ["auto", *KV_FORMATS])
def test_numbers_and_scales_belong_together(kind: str, name: str) -> None:
    """An encoded field holds vectors of whole blocks and has as many scales, in the format's type; others have none."""
    if kind in ("sparse latent", "compressed") and name not in ROWS:
        return
    parts = parts_of(CALLS[kind], name)
    scales = {other for part in parts for other in parts if other == scales_of(part)}
    for part in (part for part in parts.values() if part.name not in scales):
        kv_format = part.kv_format
        assert (scales_of(part.name) in parts) == (kv_format is not None and kv_format.scale is not None)
        assert (kv_format is not None) == (part.dtype.itemsize == 1)
        if kv_format is None:
            continue
        width = part.shape[-1] * 8 // kv_format.bits
        assert part.dtype is kv_format.element
        assert kv_format.stored_width(width) == part.shape[-1]
        if kv_format.scale is not None:
            found = parts[scales_of(part.name)]
            assert (found.dtype, found.per, found.group) == (kv_format.scale, part.per, part.group)
            assert found.kv_format is None
            assert found.shape[:-1] == part.shape[:-1]
            assert found.shape[-1] >= kv_format.scale_width(width) > 0


def test_a_state_is_never_encoded() -> None:
    for name in KV_FORMATS:
        assert all(part.kv_format is None for part in parts_of(CALLS["state"], name).values())


@pytest.mark.parametrize(
    ("width", "most", "block", "scales"), [(512, 128, 128, 4), (128, 128, 128, 1), (448, 64, 64, 7), (16, 128, 16, 1)]
)
def test_rows_have_as_few_blocks_as_there_can_be(width: int, most: int, block: int, scales: int) -> None:
    row = fp8_row(width, most, DType.FLOAT32)
    assert (row.block, row.scale_width(width), row.stored_width(width)) == (block, scales, width)


def test_no_two_formats_share_a_fingerprint() -> None:
    """Pages carry it in their keys, so that no format ever reads another's bytes."""
    spec = ModelSpec.from_config(LLAMA)
    found = {name: spec.groups(16, kv_format)[0].layout.fingerprint() for name, kv_format in KV_FORMATS.items()}
    assert len(set(found.values())) == len(KV_FORMATS)
    assert spec.groups(16)[0].layout.fingerprint() == found["bfloat16"]


@pytest.mark.parametrize(("name", "encodes"), [("float32", False), ("bfloat16", False), ("fp8_e5m2", True)])
def test_what_is_encoded(name: str, encodes: bool) -> None:
    kv_format: KVFormat = KV_FORMATS[name]
    assert kv_format.encodes is encodes
