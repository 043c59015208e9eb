"""Every family of model: Quire's reading of a configuration is what transformers caches, and pools cost the plan.

The truth is a run of a tiny model by transformers: the shapes of the tensors in its cache. `as_transformers` says in
what shapes Quire expects to find its own parts there; these differences are deliberate:

- transformers keeps `kernel` columns of a convolution's inputs, of which the next token needs `kernel - 1`;
- a window or chunk of w tokens is cut to w - 1 between steps; Quire keeps whole pages that hold as many;
- layers that share another layer's keys and values have an empty cache in transformers and no part in Quire;
- a latent is the "key" of a single head, its rotary key the "value";
- DeepSeek-V4's window holds key and value as one vector, which Quire splits into latent and rotary key; the compressor
  keeps inputs not folded yet, which Quire gives whole blocks.

Two caches are not where the others are: RecurrentGemma keeps its states in its modules, and returns no cache that it
was not given; MiniMax keeps its states in a list beside its layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.utils import logging as transformers_logging

from quire.errors import InvalidInput, UnsupportedModel
from quire.memory.pool import Pool, torch_dtype
from quire.plan.parallel import Parallelism
from quire.plan.plan import Plan
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.spec.kv_format import KV_FORMATS, KVFormat, plain_format
from quire.spec.layers import AttentionCall, Call, CompressedCall, LatentCall, StateCall
from quire.spec.layout import DType
from quire.spec.model import Layer, ModelSpec
from tests.changes import MODELS, SPECS, slow_unless_changed
from tests.covering import each_of
from tests.tiny_hybrids import HYBRIDS, build_hybrid, published
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE

REFUSED = {"diffllama": "calls attention twice per layer, which no field says"}
"""Tiny models whose configuration Quire refuses to read."""

FAMILIES = [*HYBRIDS, *(name for name in ARCHITECTURES if name not in HYBRIDS and name not in REFUSED)]
LATENT = [name for name in FAMILIES if "kv_lora_rank" in published(name)]
COMPRESSED = ("deepseek_v4",)

TOKENS = 21
"""Beyond the windows and chunks of every tiny model, and no multiple of a compressor's block."""

BLOCKS = {"mxfp8": 32, "nvfp4": 16, "fp4_e2m1": 16}
KV_DTYPES = ("auto", "fp8_e4m3", "mxfp8", "nvfp4", "fp4_e2m1")
KV_MEMORY = 4 * 2**20

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Built:
    """A tiny model: its configuration as transformers writes it, and the shapes it cached in each layer."""

    config: Mapping[str, Any]
    cached: tuple[Shapes, ...]

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_config({**self.config, "dtype": "bfloat16"})


def run(model: Any, num_tokens: int = TOKENS) -> Any:
    """The cache after a prompt."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    given_cache = {}
    if model.config.model_type == "recurrent_gemma":
        given_cache = {"past_key_values": DynamicCache(config=model.config)}
    try:
        tokens = torch.randint(0, VOCAB_SIZE, (1, num_tokens), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            out = model(tokens, use_cache=True, **given_cache)
    finally:
        transformers_logging.set_verbosity(verbosity)
    found = given_cache.get("past_key_values") or out.get("past_key_values") or out.get("cache_params")
    assert found is not None
    return found


def shapes_of(found: Any, model: Any) -> Iterator[Shapes]:
    """What each layer of a cache holds for the one sequence that was run, by Quire's names for it."""
    for index in range(model.config.num_hidden_layers):
        layer = found.layers[index] if index < len(found.layers) else None
        tensors = {"k": getattr(layer, "keys", None), "v": getattr(layer, "values", None)}
        tensors["index_k"] = getattr(layer, "indexer_keys", getattr(layer, "idx_keys", None))
        for name, attribute in (("conv", "conv_states"), ("ssm", "recurrent_states")):
            states = [state for state in getattr(layer, attribute, {}).values() if state is not None]
            assert len(states) <= 1
            tensors[name] = states[0] if states else None
        if hasattr(found, "linear_cache") and index < len(found.linear_cache) and len(found.linear_cache[index]):
            tensors["ssm"] = found.linear_cache[index]
        if model.config.model_type == "recurrent_gemma":
            block = model.model.layers[index].temporal_block
            tensors["conv"] = getattr(block, "conv1d_state", None)
            tensors["ssm"] = getattr(getattr(block, "rg_lru", None), "recurrent_states", None)
        yield {name: tuple(t.shape[1:]) for name, t in tensors.items() if t is not None and t.numel()}


@cache
def built(name: str) -> Built:
    model = build_hybrid(name)
    return Built(
        config=json.loads(json.dumps(model.config.to_dict())),
        cached=tuple(shapes_of(run(model), model)),
    )


def page_size(name: str) -> int:
    """Tokens of a page: a page of DeepSeek-V4 holds a whole block of its largest ratio."""
    return 128 if name in COMPRESSED else 16


def plan_of(name: str, **changes: Any) -> Plan:
    wanted = {
        "kv_memory": KV_MEMORY,
        "page_size": page_size(name),
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        **changes,
    }
    return make_plan(built(name).spec, PlanSettings(**wanted))


# -- the plan and its pools


@slow_unless_changed(*SPECS, *MODELS)
@each_of("kv_dtype", KV_DTYPES)
@each_of("name", FAMILIES)
def test_pools_take_the_bytes_that_were_planned(name: str, kv_dtype: str) -> None:
    if kv_dtype == "mxfp8" and "index_topk" in HYBRIDS.get(name, {}):
        with pytest.raises(InvalidInput, match="sparse and compressed latents have no rows of mxfp8"):
            plan_of(name, kv_dtype=kv_dtype)
        return
    if (refused := too_narrow(name, kv_dtype)) is not None:
        said = f"a vector of {refused} numbers cannot be stored as {kv_dtype}: it has blocks of {BLOCKS[kv_dtype]}"
        with pytest.raises(InvalidInput, match=said):
            plan_of(name, kv_dtype=kv_dtype)
        return
    plan = plan_of(name, kv_dtype=kv_dtype)
    memory = plan.memory
    taken = 0
    for index, group in enumerate(memory.groups):
        frames = memory.frames_of(index)
        assert frames > 0
        pool = Pool(group.layout, frames)
        for field in group.layout.fields:
            for layer in field.layers:
                tensor = pool.layer(field.name, layer)
                assert tensor.shape == (frames + 1, field.entries(plan.page_size), *field.shape)
                assert tensor.dtype is torch_dtype(field.dtype)
                assert tensor.nbytes > 0
                taken += tensor.nbytes
        assert pool.num_bytes == plan.config.pools[index].bytes
    assert taken == plan.config.bytes == memory.pool_bytes
    assert taken <= KV_MEMORY
    assert min(line.bytes for line in plan.ledger) >= 0
    assert sum(line.bytes for line in plan.ledger if line.where == "device") == KV_MEMORY


def too_narrow(name: str, kv_dtype: str) -> int | None:
    """The first width that blocks of this format do not fill, by the cache of transformers; None: all of them do."""
    block = BLOCKS.get(kv_dtype, 1)
    widths = [shape[-1] for layer in built(name).cached for part, shape in layer.items() if part in ("k", "v")]
    return next((width for width in widths if width % block), None)


@each_of("name", HYBRIDS)
def test_the_planner_chooses_a_page_that_fits(name: str) -> None:
    assert plan_of(name, page_size=None).page_size == page_size(name)


@each_of("name", [name for name in FAMILIES if name not in COMPRESSED])
def test_a_page_costs_what_transformers_caches_for_its_tokens(name: str) -> None:
    """Compressors keep whole blocks: they are compared part by part below."""
    size = page_size(name)
    whole = sum(
        group.layout.bytes_per_frame
        for group in built(name).spec.groups(size, plain_format(DType.BFLOAT16), window_pool=False)
    )
    expected = 0
    for layer in built(name).cached:
        for part, shape in layer.items():
            if part in ("k", "v"):
                expected += size * shape[0] * shape[2] * 2
            elif part == "index_k" and name in LATENT:
                expected += size * (shape[-1] + 4 * -(-shape[-1] // 128))  # FP8 and float32 scales, whatever the format
            elif part == "index_k":
                expected += size * shape[-1] * 2
            elif part == "conv":
                expected += shape[0] * (shape[1] - stored_too_many(name)) * 2
            else:
                expected += math.prod(shape) * 4
    assert whole == expected


# -- the reading of the configuration


def stored_too_many(name: str) -> int:
    """Columns of a convolution that transformers keeps beyond the `kernel - 1` it needs."""
    return 0 if name == "recurrent_gemma" else 1


def as_transformers(layer: Layer, name: str) -> Shapes:
    """The shapes in which transformers caches the parts of a layer after `TOKENS` tokens."""
    found: Shapes = {}
    for call in layer:
        for part in call.parts(plain_format(DType.FLOAT32), DType.FLOAT32):
            kept = TOKENS if part.reach.kind == "full" else min(TOKENS, part.reach.tokens - 1)
            if part.name in ("k", "v"):
                heads, width = part.shape
                found[part.name] = (heads, kept, width)
            elif part.name in ("latent", "rope"):
                found["k" if part.name == "latent" else "v"] = (1, kept, *part.shape)
            elif part.name == "index_k":
                found["index_k"] = (kept, *part.shape) if isinstance(call, LatentCall) else (1, kept, *part.shape)
            elif part.name == "conv":
                channels, columns = part.shape
                found["conv"] = (channels, columns + stored_too_many(name))
            elif part.name == "ssm":
                # A recurrence of one number per channel has no second axis in transformers.
                found["ssm"] = part.shape[:1] if part.shape[1:] == (1,) else part.shape
            else:
                assert part.name == "index_k_scale"
    return found


@each_of("name", [name for name in FAMILIES if name not in COMPRESSED])
def test_each_layer_keeps_what_transformers_caches_in_it(name: str) -> None:
    assert tuple(as_transformers(layer, name) for layer in built(name).spec.layers) == built(name).cached


@each_of("name", HYBRIDS)
def test_the_published_spelling_reads_as_what_transformers_writes(name: str) -> None:
    read, written = ModelSpec.from_config(published(name)), built(name).spec
    assert read.layers == written.layers
    assert read.context_length == written.context_length


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_field_says_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="does not call attention exactly once per layer"):
        ModelSpec.from_config(published(name))


@pytest.mark.parametrize("name", LATENT)
def test_a_latent_is_smaller_than_keys_and_values_of_all_heads(name: str) -> None:
    config = built(name).config
    expanded = config["num_attention_heads"] * (
        config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]
    )
    calls = [call for call in built(name).spec.calls if isinstance(call, LatentCall)]
    assert {(call.rank, call.rope_dim) for call in calls} == {(config["kv_lora_rank"], config["qk_rope_head_dim"])}
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] < expanded


def test_shared_layers_keep_nothing_and_the_others_follow_their_own_sizes() -> None:
    heads = {
        name: [
            call.kv_heads * call.key_dim if layer else 0
            for layer in built(name).spec.layers
            for call in layer or (None,)
        ]
        for name in ("gemma4_text", "gemma4_text_shared", "gemma3n_text")
    }
    assert heads == {
        "gemma4_text": [2 * 32, 2 * 32, 2 * 32, 2 * 64] * 3,
        "gemma4_text_shared": [4 * 32, 4 * 32, 1 * 64, 4 * 32, 0, 0],
        "gemma3n_text": [2 * 32, 2 * 32, 2 * 32, 2 * 32, 0, 0],
    }


def test_compressed_layers_keep_what_transformers_caches_in_them() -> None:
    model = build_hybrid("deepseek_v4")
    calls = built("deepseek_v4").spec.calls
    assert [call.ratio for call in calls if isinstance(call, CompressedCall)] == [0, 128, 4]
    for call, kept in zip(calls, run(model).layers, strict=True):
        assert isinstance(call, CompressedCall)
        parts = {p.name: p for p in call.parts(plain_format(DType.FLOAT32), DType.FLOAT32)}
        width = parts["latent"].shape[0] + parts["rope"].shape[0]
        assert kept.keys.shape[1:] == (1, call.window - 1, width)
        if not call.ratio:
            assert set(parts) == {"latent", "rope"}
            continue
        assert parts["compressed_latent"].shape == parts["latent"].shape
        assert parts["compressed_rope"].shape == parts["rope"].shape
        assert kept.compressed_kv["compressor"].shape[1:] == (TOKENS // call.ratio, width)
        assert {parts[name].per for name in ("compressed_latent", "compressed_rope")} == {call.ratio}
        if call.overlap:
            assert kept.compressed_kv["indexer"].shape[1:] == (TOKENS // call.ratio, *parts["index_k"].shape)
            assert parts["index_k"].per == call.ratio
        else:
            assert "index_k" not in parts
        for ring, buffer in (("compressor", "compressor"), ("index_compressor", "indexer")):
            if ring in parts:
                rows, numbers = parts[ring].shape
                assert numbers == kept.buffer_kv[buffer].shape[2] + kept.buffer_gate[buffer].shape[2]
                assert rows == call.ratio * (2 if call.overlap else 1)


@pytest.mark.parametrize("num_tokens", range(126, 132))
def test_the_rings_of_a_compressor_hold_what_transformers_buffers(num_tokens: int) -> None:
    calls = built("deepseek_v4").spec.calls
    for call, kept in zip(calls, run(build_hybrid("deepseek_v4"), num_tokens).layers, strict=True):
        parts = {p.name: p for p in call.parts(plain_format(DType.FLOAT32), DType.FLOAT32)}
        for ring, buffer in (("compressor", "compressor"), ("index_compressor", "indexer")):
            if ring not in parts:
                continue
            held = [
                getattr(kept, f"{what}_{kind}", {}).get(buffer)
                for what in ("buffer", "overlap")
                for kind in ("kv", "gate")
            ]
            assert sum(tensor.numel() for tensor in held if tensor is not None) <= math.prod(parts[ring].shape)


# -- tensor parallelism


def bytes_over_ranks(spec: ModelSpec, size: int, tp: int) -> int:
    return tp * sum(group.layout.bytes_per_frame for group in spec.groups(size, tp=tp))


def bytes_held_by_every_rank(layer: Shapes, name: str, tp: int) -> int:
    """Of the bytes of one token in one layer, those that no rank can leave to the others: one-headed vectors."""
    total = 0
    for part in ("k", "v"):
        if part in layer and layer[part][0] < tp:
            total += layer[part][2] * 2
    if "index_k" in layer:
        width = layer["index_k"][-1]
        total += width + 4 * -(-width // 128) if name in LATENT else width * 2
    return total


@each_of("name", [name for name in FAMILIES if name not in COMPRESSED])
def test_two_ranks_share_all_but_what_has_one_head(name: str) -> None:
    spec, size = built(name).spec, page_size(name)
    one = bytes_over_ranks(spec, size, 1)
    both = bytes_over_ranks(spec, size, 2)
    repeated = size * sum(bytes_held_by_every_rank(layer, name, 2) for layer in built(name).cached)
    assert both == one + repeated
    plan = plan_of(name, parallel=Parallelism(tp=2))
    assert 2 * sum(pool.bytes_per_frame for pool in plan.config.pools) == both


def test_ranks_all_hold_compressed_latents() -> None:
    spec = built("deepseek_v4").spec
    assert bytes_over_ranks(spec, 128, 2) == 2 * bytes_over_ranks(spec, 128, 1)


@each_of("name", FAMILIES)
def test_three_ranks_are_refused_where_heads_do_not_divide(name: str) -> None:
    counts = {
        shape[0]
        for layer in built(name).cached
        for part, shape in layer.items()
        if part in ("k", "v", "ssm") or (part == "conv" and "ssm" not in layer)
    }
    if all(count % 3 == 0 or count == 1 for count in counts):
        assert bytes_over_ranks(built(name).spec, page_size(name), 3) >= bytes_over_ranks(
            built(name).spec, page_size(name), 1
        )
        return
    with pytest.raises(InvalidInput, match="cannot be split over 3 ranks"):
        plan_of(name, parallel=Parallelism(tp=3))


def test_a_state_is_never_split_within_a_head() -> None:
    with pytest.raises(InvalidInput, match="4 state heads cannot be split over 8 ranks"):
        built("qwen3_next").spec.groups(16, tp=8)


# -- any layers at all

WIDTHS = st.sampled_from([32, 64, 96, 160])
PAGE_SIZES = st.sampled_from([1, 16, 128])


@st.composite
def attention_calls(draw: st.DrawFn) -> AttentionCall:
    chunked = draw(st.booleans())
    # Sizes of windows and chunks are kept apart: no model has both, and a name of a group says only the size.
    return AttentionCall(
        kv_heads=draw(st.integers(1, 4)),
        key_dim=draw(WIDTHS),
        value_dim=draw(WIDTHS),
        window=draw(st.sampled_from([8, 64] if chunked else [0, 5, 16])),
        chunked=chunked,
        index_dim=draw(st.sampled_from([0, 32, 130])),
    )


@st.composite
def latent_calls(draw: st.DrawFn) -> LatentCall:
    sparse = draw(st.booleans())
    return LatentCall(
        rank=draw(WIDTHS),
        rope_dim=draw(WIDTHS),
        sparse=sparse,
        index_dim=draw(st.sampled_from([0, 64, 130])) if sparse else 0,
    )


@st.composite
def state_calls(draw: st.DrawFn) -> StateCall:
    groups = draw(st.integers(0, 3))
    return StateCall(
        kernel=draw(st.integers(0, 4)),
        channels=draw(st.integers(1, 9)),
        groups=groups,
        group_channels=draw(st.integers(1, 5)) if groups else 0,
        heads=draw(st.integers(0, 3)),
        matrix=tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=2))),
        state_dtype=draw(st.sampled_from([DType.FLOAT32, DType.BFLOAT16])),
    )


@st.composite
def compressed_calls(draw: st.DrawFn, size: int) -> CompressedCall:
    ratio = draw(st.sampled_from([ratio for ratio in (0, 4, 128) if not ratio or size % ratio == 0]))
    return CompressedCall(
        nope_dim=draw(WIDTHS),
        rope_dim=draw(WIDTHS),
        window=draw(st.sampled_from([5, 16])),
        ratio=ratio,
        overlap=ratio == 4,
        rollback=draw(st.booleans()),
        index_dim=draw(st.sampled_from([0, 64])) if ratio == 4 else 0,
    )


def price(call: Call, kept: KVFormat, size: int) -> int:
    """Bytes of a page of one call in a bfloat16 model, from the definitions of the formats."""

    def vector(width: int) -> int:
        return width * kept.bits // 8 + (width // kept.block if kept.block else 0)

    def scaled(width: int) -> int:
        return width + 4 * math.ceil(width / 128)

    if isinstance(call, AttentionCall):
        heads = call.kv_heads * (vector(call.key_dim) + vector(call.value_dim))
        return size * (heads + 2 * call.index_dim)
    if isinstance(call, LatentCall):
        fp8 = call.sparse and kept.bits == 8
        row = scaled(call.rank) + 2 * call.rope_dim if fp8 else vector(call.rank) + vector(call.rope_dim)
        return size * (row + scaled(call.index_dim))
    if isinstance(call, StateCall):
        channels = call.channels + call.groups * call.group_channels
        matrices = call.heads * math.prod(call.matrix) * call.state_dtype.itemsize
        return channels * max(0, call.kernel - 1) * 2 + matrices
    assert isinstance(call, CompressedCall)
    width = call.nope_dim + call.rope_dim
    row = vector(call.nope_dim) + vector(call.rope_dim)
    if kept.bits == 8:
        row = call.nope_dim + 8 * math.ceil(math.ceil(call.nope_dim / 64) / 8) + 2 * call.rope_dim
    total = size * row
    if call.ratio:
        blocks = 2 if call.overlap else 1
        rows = blocks * call.ratio * (2 if call.rollback else 1)
        total += size // call.ratio * (row + scaled(call.index_dim))
        total += 4 * rows * 2 * blocks * (width + call.index_dim)
    return total


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    size = draw(PAGE_SIZES)
    call = st.one_of(attention_calls(), latent_calls(), state_calls(), compressed_calls(size))
    layers = draw(st.lists(st.lists(call, max_size=2).map(tuple), max_size=5).map(tuple))
    spec = ModelSpec(architecture="any", layers=layers, context_length=512, vocab_size=8, dtype=DType.BFLOAT16)
    return spec, size


@given(model=models(), kv_dtype=st.sampled_from(sorted(KV_FORMATS)), frames=st.integers(0, 3), windows=st.booleans())
@settings(max_examples=150)
def test_pools_of_any_layers_take_the_price_of_their_calls(
    model: tuple[ModelSpec, int], kv_dtype: str, frames: int, windows: bool
) -> None:
    spec, size = model
    kept = KV_FORMATS[kv_dtype]
    if kept.bits == 8 and kept.name != "fp8_e4m3":
        assume(not any(isinstance(c, CompressedCall) or getattr(c, "sparse", False) for c in spec.calls))
    groups = spec.groups(size, kept, window_pool=windows)
    assert len({group.name for group in groups}) == len(groups)
    owned: set[tuple[str, int]] = set()
    for group in groups:
        try:
            pool = Pool(group.layout, frames)
        except UnsupportedModel:  # vectors of odd sizes, which no model has
            continue
        tensors = {(f.name, layer): pool.layer(f.name, layer) for f in group.layout.fields for layer in f.layers}
        assert sum(tensor.nbytes for tensor in tensors.values()) == pool.num_bytes
        assert pool.num_bytes == group.layout.bytes_per_frame * (frames + 1)
        assert not owned & set(tensors)
        owned |= set(tensors)
    assert sum(group.layout.bytes_per_frame for group in groups) == sum(price(call, kept, size) for call in spec.calls)


@given(model=models(), tp=st.sampled_from([2, 3, 4]))
@settings(max_examples=150)
def test_ranks_together_hold_at_least_the_model(model: tuple[ModelSpec, int], tp: int) -> None:
    spec, size = model
    try:
        over_ranks = bytes_over_ranks(spec, size, tp)
    except InvalidInput:
        assert any(isinstance(call, (AttentionCall, StateCall)) for call in spec.calls)
        return
    assert over_ranks >= bytes_over_ranks(spec, size, 1)
