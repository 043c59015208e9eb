"""Block sizes that another engine chose for models with attention and recurrent states, from our dimensions.

That engine keeps both kinds in blocks of one size. So a block of attention, of one layer on one rank, must be at least
a state of one layer, and has the fewest tokens, a multiple of 16, that make it so; the state is then padded to it:

    block = ceil(state bytes / attention bytes per token / 16) * 16

Drafting n tokens adds n rows to the convolution, so that a refused draft can be taken back.

Ours keep frames of two sizes instead: a page stays 16 tokens, and a prefix can be reused from 16 tokens on.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.plan.parallel import Parallelism
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.spec.catalogue import CATALOGUE
from quire.spec.kv_format import kv_format
from quire.spec.layers import STATE_GROUP, AttentionCall, StateCall
from quire.spec.layout import DType
from quire.spec.model import ModelSpec

DATA = Path(__file__).parents[3] / "shared" / "data"
BLOCKS = DATA / "vllm_hybrid_block_sizes.csv"
GRID = 16  # tokens: a block is a multiple of it

# Only what one layer of each kind keeps matters here, so the pattern is the shortest that has both.
NEMOTRON_NANO_9B: Mapping[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 2,
    "hybrid_override_pattern": "M*",
    "hidden_size": 4480,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "vocab_size": 131072,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How a recorded row is asked for here. `config` is a recorded file, a name in the catalogue, or typed above."""

    config: str | Mapping[str, Any]
    kv_dtype: str = "auto"
    state_dtype: DType | None = None
    drafts: int = 0


ROWS: Mapping[str, Row] = {
    "Qwen/Qwen3.5-9B": Row(config="Qwen__Qwen3.5-9B.json"),
    "Qwen/Qwen3.5-4B": Row(config="qwen3.5-4b"),
    "Qwen/Qwen3.5-9B fp8 KV": Row(config="Qwen__Qwen3.5-9B.json", kv_dtype="fp8_e4m3"),
    "Qwen/Qwen3.5-35B-A3B": Row(config="Qwen__Qwen3.5-35B-A3B.json"),
    "Qwen/Qwen3.6-35B-A3B": Row(config="Qwen__Qwen3.5-35B-A3B.json"),  # the same dimensions
    "Qwen/Qwen3.5-27B": Row(config="Qwen__Qwen3.5-27B.json"),
    "Qwen3.8-27B fp8 KV": Row(config="Qwen__Qwen3.5-27B.json", kv_dtype="fp8_e4m3"),  # the same dimensions
    "Qwen3.5-27B NVFP4 fp8 KV + MTP1": Row(config="Qwen__Qwen3.5-27B.json", kv_dtype="fp8_e4m3", drafts=1),
    "Qwen3.8-27B bf16 KV + MTP3": Row(config="Qwen__Qwen3.5-27B.json", drafts=3),
    "ibm-granite/granite-4.0-h-small": Row(config="granite-4.0-h-small", state_dtype=DType.BFLOAT16),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": Row(config=NEMOTRON_NANO_9B, state_dtype=DType.BFLOAT16),
}

pytestmark = pytest.mark.skipif(not BLOCKS.exists(), reason=f"no recorded blocks: {BLOCKS.name} is not beside the repo")


@cache
def recorded() -> dict[str, dict[str, str]]:
    with BLOCKS.open(encoding="utf-8", newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def spec_of(row: Row) -> ModelSpec:
    config = row.config
    if isinstance(config, str):
        file = DATA / "configs" / config
        config = json.loads(file.read_text(encoding="utf-8")) if file.suffix == ".json" else CATALOGUE[config].config
    stored = {"mamba_ssm_dtype": row.state_dtype.value} if row.state_dtype is not None else {}
    return ModelSpec.from_config({**config, **stored})


def attention_bytes(row: Row, spec: ModelSpec, tp: int) -> int:
    """Bytes per token of one attention layer on one rank, scales included."""
    (call,) = {call for call in spec.calls if isinstance(call, AttentionCall)}
    parts = call.on_rank(tp).parts(kv_format(row.kv_dtype, spec.dtype), spec.dtype)
    return sum(part.shape[0] * part.shape[1] * part.dtype.itemsize for part in parts)


def state_bytes(row: Row, spec: ModelSpec, tp: int) -> tuple[int, int]:
    """Bytes of the recurrence and of the convolution of one layer on one rank, with a row more per drafted token."""
    layers = sum(isinstance(call, StateCall) for call in spec.calls)
    (group,) = (group for group in spec.groups(GRID, tp=tp) if group.name == STATE_GROUP)
    sizes = {field.name: field.bytes_per_frame(GRID) // layers for field in group.layout.fields}
    (call,) = {call for call in spec.calls if isinstance(call, StateCall)}
    rows = call.kernel - 1
    return sizes["ssm"], sizes["conv"] // rows * (rows + row.drafts)


def test_every_recorded_row_is_here() -> None:
    assert len(recorded()) == 11
    assert recorded().keys() == ROWS.keys()


@pytest.mark.parametrize("model", ROWS)
def test_what_a_layer_keeps_is_what_was_recorded(model: str) -> None:
    row, printed = ROWS[model], recorded()[model]
    spec, tp = spec_of(row), int(printed["tp"])
    assert attention_bytes(row, spec, tp) == int(printed["attention_bytes_per_token_per_layer_per_rank"])
    assert state_bytes(row, spec, tp) == (int(printed["ssm_state_bytes"]), int(printed["conv_state_bytes"]))


@pytest.mark.parametrize("model", ROWS)
def test_the_rule_gives_the_recorded_block_and_padding(model: str) -> None:
    row, printed = ROWS[model], recorded()[model]
    spec, tp = spec_of(row), int(printed["tp"])
    per_token, state = attention_bytes(row, spec, tp), sum(state_bytes(row, spec, tp))
    block = -(-state // (per_token * GRID)) * GRID
    padding = Fraction(100 * (block * per_token - state), state)
    assert block == int(printed["printed_block_size"]) == int(printed["computed_block_size"])
    assert f"{float(padding):.3f}" == printed["computed_pad_percent"]
    if printed["printed_pad_percent"]:
        assert f"{float(padding):.2f}" == printed["printed_pad_percent"]


@pytest.mark.parametrize("model", ROWS)
def test_our_page_does_not_grow_to_the_size_of_a_state(model: str) -> None:
    row, printed = ROWS[model], recorded()[model]
    settings = PlanSettings(kv_memory=32 * 2**30, kv_dtype=row.kv_dtype, parallel=Parallelism(tp=int(printed["tp"])))
    plan = make_plan(spec_of(row), settings)
    assert plan.page_size == 16
    assert plan.minimum_reusable_prefix == 16
    assert int(printed["printed_block_size"]) >= 8 * plan.minimum_reusable_prefix
    kinds = {pool.group.reach.kind: pool.bytes_per_frame for pool in plan.config.pools}
    assert kinds.keys() == {"full", "state"}
    assert kinds["full"] < kinds["state"]
