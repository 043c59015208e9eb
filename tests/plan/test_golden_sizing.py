"""Recorded pool sizes of another engine, two versions of it: the same tokens, slots and bytes per token from the same
bytes.

Frame 0 of every pool, where padded tokens write, is inside our budget and comes on top of theirs. So ours is solved at
the recorded bytes plus one frame of each pool of tokens. (Of states, the newer version counts the padding as we do.)

Every case is either equal or in `LISTED`, a difference of decision 015: there the exact relation in bytes is asserted.
A case whose recorded answer is an error must raise PlanError here.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.errors import PlanError
from quire.plan.configurator import MemoryPoolConfig, MemoryPoolConfigurator
from quire.plan.mix import uniform
from quire.plan.planner import create_memory_pool_configurator
from quire.plan.settings import PlanSettings
from quire.spec.families import draft_like
from quire.spec.group import GroupSpec
from quire.spec.kv_format import kv_format
from quire.spec.layers import AttentionCall, StateCall
from quire.spec.layout import PER_PAGE, Field
from quire.spec.model import ModelSpec
from quire.spec.speculation import SpeculativeConfig
from tests.plan.check import pool_settings

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
OLD, NEW = "0.5.12.post1", "0.5.23"
EQUAL = {OLD: 1021, NEW: 1460}
"""Cases at least that must be equal, refusals among them."""

KV_DTYPES = {"bf16": "auto", "fp4_mx_block16": "fp4_e2m1"}
"""Recorded names that are not ours."""

EAGLE = SpeculativeConfig(method="eagle", num_steps=5, num_draft_tokens=6, num_layers=1)
DEFAULT_RATIO = Fraction(4, 5)  # of window to full tokens
COMPRESSED_RATIO = Fraction(1, 10)  # the newer version's default for compressed attention
DEFAULT_STATE_RATIO = Fraction(9, 10)
FLOAT_ROUNDING = 4e-16  # of a sum of a few products

pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="no recorded sizes: shared/golden is not beside the repo")


@dataclass(frozen=True, slots=True)
class Case:
    """One recorded question and its answer; `output` None where the recorded engine raised."""

    version: str
    config_name: str
    input: dict[str, Any]
    dims: dict[str, Any]
    output: dict[str, Any] | None

    @property
    def model(self) -> str:
        return str(self.input["model"])

    @property
    def page_size(self) -> int:
        return int(self.input["page_size"])

    @property
    def available(self) -> int:
        return int(self.input["available_bytes"])

    @property
    def speculation(self) -> SpeculativeConfig | None:
        return EAGLE if self.input["spec"] == "eagle_5_1_6" else None

    @property
    def extra(self) -> dict[str, Any]:
        return dict(self.input["extra"])

    @property
    def is_compressed(self) -> bool:
        return self.model.startswith("dsv4")

    @property
    def keeps_states(self) -> bool:
        return self.model in ("qwen3-next-80b", "nemotron-h-8b", "falcon-h1-1.5b")

    @property
    def window_ratio(self) -> Fraction:
        given = self.input["swa_full_tokens_ratio"]
        if given is not None:
            return Fraction(str(given))
        return COMPRESSED_RATIO if self.is_compressed and self.version == NEW else DEFAULT_RATIO

    def __str__(self) -> str:
        return f"{self.version} {self.input}"


@dataclass(frozen=True, slots=True)
class Listed:
    """A difference on purpose: which cases, how many, and why."""

    applies: Callable[[Case], bool]
    count: int
    reason: str


LISTED = {
    "old: padding state": Listed(
        lambda case: case.version == OLD and case.keeps_states and case.output is not None,
        404,
        "the older version does not price the padding slot of the states; we and the newer one do",
    ),
    "old: draft layers": Listed(
        lambda case: case.version == OLD and case.speculation is not None and not case.is_compressed,
        12,
        "the older version does not price the keys and values of draft layers; we and the newer one do",
    ),
    "old: window below one request": Listed(
        lambda case: case.version == OLD and case.output is not None and window_is_too_small(case),
        5,
        "the older version accepts a window pool in which no request fits; we and the newer one refuse",
    ),
    "new: dequantised prompt": Listed(
        lambda case: case.extra.get("prefill_attention_backend") == "flashinfer",
        4,
        "one backend keeps an FP8 copy of one layer's four-bit keys and values for prompts",
    ),
    "old: rings per window": Listed(
        lambda case: case.version == OLD and case.is_compressed and case.page_size != 128 and not case.speculation,
        20,
        "the older version keeps compressors' rings once per window; we once per page, so half as many at 256 tokens",
    ),
    "old: rings of drafts": Listed(
        lambda case: case.version == OLD and case.is_compressed and case.speculation is not None,
        6,
        "with speculation the other engine doubles the rings and prices the draft layer as the mean of the others; our "
        "rings have one length, and the draft layer is like the model's last",
    ),
    "new: rings per request": Listed(
        lambda case: case.version == NEW and case.is_compressed,
        49,
        "the newer version keeps the large rings per request, at a fixed price before any token; we keep them per "
        "page, so that a page can be resumed by another request; and it pads a page of latents to 576 bytes",
    ),
}


# -- reading and solving


@cache
def recorded(version: str) -> dict[str, Any]:
    with gzip.open(GOLDEN / f"sizing_{version}.json.gz", "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


def cases(version: str) -> Iterator[Case]:
    models = recorded(version)["models"]
    for case in recorded(version)["cases"]:
        model = case["input"]["model"]
        forced = f"{model}#forced" if case["input"]["forced_hybrid"] else model
        yield Case(version, forced if forced in models else model, case["input"], case["dims"], case.get("output"))


def listed(name: str) -> list[Case]:
    """The cases of one difference; as many as there were."""
    found = [case for version in (OLD, NEW) for case in cases(version) if LISTED[name].applies(case)]
    assert len(found) == LISTED[name].count
    return found


@cache
def read_spec(version: str, config_name: str) -> ModelSpec:
    return ModelSpec.from_config(recorded(version)["models"][config_name])


@cache
def read_groups(
    version: str, config_name: str, tp: int, kv_dtype: str, page_size: int, drafts: int, window_pool: bool
) -> tuple[GroupSpec, ...]:
    spec = read_spec(version, config_name)
    if drafts and not spec.drafts:
        spec = ModelSpec(
            architecture=spec.architecture,
            layers=spec.layers,
            context_length=spec.context_length,
            vocab_size=spec.vocab_size,
            dtype=spec.dtype,
            drafts=(draft_like(spec.layers),),
        )
    kept = kv_format(kv_dtype, spec.dtype)
    return spec.groups(page_size, kept, tp=tp, num_drafts=drafts, window_pool=window_pool)


def groups_of(case: Case, page_size: int, *, drafts: bool = True) -> tuple[GroupSpec, ...]:
    """The groups of one rank. Windows have a pool of their own only where the recorded engine gave them one."""
    dtype = case.input["kv_cache_dtype"]
    return read_groups(
        case.version,
        case.config_name,
        case.input["tp"],
        KV_DTYPES.get(dtype, dtype),
        page_size,
        1 if drafts and case.speculation is not None else 0,
        case.input["forced_hybrid"] or case.is_compressed,
    )


def padding_of(groups: tuple[GroupSpec, ...]) -> int:
    return sum(group.layout.bytes_per_frame for group in groups if group.reach.kind != "state")


def options_of(case: Case) -> PlanSettings:
    extra = case.extra
    states = extra.get("max_mamba_cache_size")
    if extra.get("disable_radix_cache"):
        states = extra["max_running_requests"]  # nothing is kept, so one state per request
    return pool_settings(
        mix=uniform(4096, "no request: ratios are given"),
        enable_prefix_caching=not extra.get("disable_radix_cache"),
        speculative_config=case.speculation,
        swa_full_tokens_ratio=case.window_ratio,
        mamba_full_memory_ratio=Fraction(str(extra.get("mamba_full_memory_ratio", DEFAULT_STATE_RATIO))),
        max_mamba_cache_size=states,
        concurrency=extra.get("max_running_requests"),
    )


def configurator_of(case: Case, *, drafts: bool = True) -> MemoryPoolConfigurator:
    return create_memory_pool_configurator(
        lambda page_size: groups_of(case, page_size, drafts=drafts), options_of(case), page_size=case.page_size
    )


def solve(case: Case, *, more_bytes: int = 0, drafts: bool = True) -> MemoryPoolConfig:
    """Our pools at the recorded bytes, `more_bytes` and the padding frames."""
    budget = case.available + padding_of(groups_of(case, case.page_size, drafts=drafts)) + more_bytes
    return configurator_of(case, drafts=drafts).calculate_pool_sizes(budget, case.page_size)


def state_bytes(case: Case) -> int:
    (group,) = (group for group in groups_of(case, case.page_size) if group.reach.kind == "state")
    return group.layout.bytes_per_frame


def window_is_too_small(case: Case) -> bool:
    """Whether the recorded window pool is at most a window and a page, which is what the newer version refuses."""
    assert case.output is not None
    windows = [group.reach.tokens for group in groups_of(case, case.page_size) if group.reach.kind == "window"]
    return any(case.output["swa_max_total_num_tokens"] <= window + case.page_size for window in windows)


# -- what must be equal


def compared(config: MemoryPoolConfig, output: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Ours and theirs, for every figure that both have."""
    entries = config.compressed_max_total_num_tokens
    ours = {
        "max_total_num_tokens": config.max_total_num_tokens,
        "full_max_total_num_tokens": config.full_max_total_num_tokens,
        "swa_max_total_num_tokens": config.swa_max_total_num_tokens,
        "max_mamba_cache_size": config.state_slots,
        "coef_cell_size": float(config.coeff),
        "c4_max_total_num_tokens": entries.get(4, 0),
        "c128_max_total_num_tokens": entries.get(128, 0),
    }
    if "coef_bytes_per_full_token" in output:
        ours["coef_bytes_per_full_token"] = float(config.coeff)
    states = [pool for pool in config.pools if pool.group.reach.kind == "state"]
    if states:
        ours["mamba_cache_per_req_bytes"] = states[0].bytes_per_frame
    return {name: (value, output[name]) for name, value in ours.items() if name in output}


def unequal(config: MemoryPoolConfig, output: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: both for name, both in compared(config, output).items() if not same(*both)}


def same(ours: Any, theirs: Any) -> bool:
    """Equality. Prices that are no integers were summed in floating point there, so their last bit may differ."""
    if isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=FLOAT_ROUNDING)
    return bool(ours == theirs)


def differences(case: Case) -> dict[str, tuple[Any, Any]]:
    """Ours and theirs where they differ, a refusal being a figure too."""
    try:
        config = solve(case)
    except PlanError as error:
        return {} if case.output is None else {"refused": (str(error), None)}
    return unequal(config, case.output) if case.output is not None else {"refused": (None, "an error")}


@pytest.mark.parametrize("version", [OLD, NEW])
def test_every_case_that_is_not_listed_is_equal(version: str) -> None:
    equal, wrong = 0, []
    for case in cases(version):
        if any(difference.applies(case) for difference in LISTED.values()):
            continue
        found = differences(case)
        equal += not found
        if found:
            wrong.append((str(case), found))
    assert wrong == []
    assert equal >= EQUAL[version]


def test_every_listed_case_is_listed_once_and_differs() -> None:
    for version in (OLD, NEW):
        for case in cases(version):
            times = sum(difference.applies(case) for difference in LISTED.values())
            assert times == 0 or (times == 1 and differences(case)), str(case)


def test_states_leave_the_recorded_bytes_to_the_other_pools() -> None:
    left = [
        (case.available - pool.bytes, case.output["kv_bytes_after_mamba"])
        for case in cases(NEW)
        if case.keeps_states and case.output is not None
        for pool in solve(case).pools
        if pool.group.reach.kind == "state"
    ]
    assert len(left) == 404
    assert [both for both in left if both[0] != both[1]] == []
    for case in listed("old: padding state"):  # it leaves them what its slots, without padding, do not take
        assert case.output is not None
        taken = case.output["max_mamba_cache_size"] * state_bytes(case)
        assert case.available - taken == case.output["kv_bytes_after_mamba"], str(case)


ELSEWHERE = {
    "configurator": "their class; with states ours has a class of its own",
    "max_running_requests": "decision 015: most requests at once",
    "c4_state_pool_size": "decision 015: rings are in pages here",
    "c128_state_pool_size": "decision 015: rings are in pages here",
    "coef_bytes_per_swa_token": "in the test of rings per request",
    "coef_swa_cap_tokens": "in the test of rings per request",
    "kv_bytes_after_mamba": "in the test of what states leave",
    "coef_full_per_token": "in the test of layers",
    "coef_swa_per_token": "in the test of layers",
    "mamba_layer_ids": "in the test of layers",
    "full_attention_layer_ids": "in the test of layers",
    "mamba_conv_shape": "in the test of layers",
    "mamba_temporal_shape": "in the test of layers",
    "mamba_dtype": "in the test of layers",
}
"""Figures that are not compared case by case, and where they are or why they are not."""


def test_every_figure_is_compared_or_has_a_reason() -> None:
    found = {name for version in (OLD, NEW) for case in cases(version) for name in case.output or ()}
    too_small = {str(case) for case in listed("old: window below one request")}
    both = {
        name
        for version in (OLD, NEW)
        for case in cases(version)
        if case.output is not None and str(case) not in too_small
        for name in compared(solve(case), case.output)
    }
    assert found == both | ELSEWHERE.keys()
    assert not both & ELSEWHERE.keys()


def layers_with(case: Case, kinds: Callable[[Any], bool]) -> list[int]:
    layers = read_spec(case.version, case.config_name).layers
    return [index for index, calls in enumerate(layers) if any(map(kinds, calls))]


def per_layer(case: Case, kind: str) -> Fraction:
    """Bytes of one token in one layer of a kind."""
    groups = groups_of(case, case.page_size, drafts=False)
    (layout,) = (group.layout for group in groups if group.reach.kind == kind)
    (layers,) = {field.layers for field in layout.fields}
    return Fraction(layout.bytes_per_frame, case.page_size * len(layers))


def test_every_layer_is_of_the_recorded_kind_and_price() -> None:
    found: Counter[str] = Counter()
    for version in (OLD, NEW):
        for case in cases(version):
            output = case.output or {}
            if "coef_full_per_token" in output:
                assert per_layer(case, "full") == output["coef_full_per_token"], str(case)
                assert per_layer(case, "window") == output["coef_swa_per_token"], str(case)
                found["prices"] += 1
            if "swa_layer_ids" in case.dims:
                assert layers_with(case, lambda call: bool(call.window)) == case.dims["swa_layer_ids"]
                assert layers_with(case, lambda call: not call.window) == case.dims["full_layer_ids"]
                found["windows"] += 1
            if "mamba_layer_ids" in output:
                assert layers_with(case, lambda call: isinstance(call, StateCall)) == output["mamba_layer_ids"]
                attending = layers_with(case, lambda call: isinstance(call, AttentionCall))
                assert attending == output["full_attention_layer_ids"]
                found["states"] += 1
            if "mamba_conv_shape" in output:
                (group,) = (g for g in groups_of(case, case.page_size) if g.reach.kind == "state")
                conv, ssm = group.layout.fields
                assert [list(conv.shape)] == output["mamba_conv_shape"]
                assert list(ssm.shape) == output["mamba_temporal_shape"]
                assert [f"torch.{field.dtype}" for field in (conv, ssm)] == output["mamba_dtype"]
                found["shapes"] += 1
    assert found == {"prices": 715, "windows": 720, "states": 808, "shapes": 404}


# -- what differs, and by how much


def test_an_unpriced_padding_state_is_one_slot_or_its_bytes_more() -> None:
    """With a number of slots, their tokens are ours with one state's bytes more. With a ratio the bytes of the states
    are given, so they have one slot more in them, and as many tokens."""
    for case in listed("old: padding state"):
        assert case.output is not None
        if options_of(case).max_mamba_cache_size is not None:
            assert unequal(solve(case, more_bytes=state_bytes(case)), case.output) == {}, str(case)
            continue
        ours = unequal(solve(case), case.output)
        slots = case.output["max_mamba_cache_size"]
        assert ours == {"max_mamba_cache_size": (slots - 1, slots)}, str(case)


def test_unpriced_draft_layers_are_our_plan_without_them() -> None:
    for case in listed("old: draft layers"):
        assert case.output is not None
        assert unequal(solve(case, drafts=False), case.output) == {}, str(case)
        (pool,) = solve(case).pools
        layers = read_spec(case.version, case.config_name).layers
        one_layer = Fraction(case.output["coef_cell_size"], len(layers))
        assert solve(case).coeff - case.output["coef_cell_size"] == one_layer
        assert pool.frames * case.page_size < case.output["max_total_num_tokens"]


def test_a_window_pool_without_room_for_a_request_is_refused() -> None:
    for case in listed("old: window below one request"):
        assert case.output is not None
        with pytest.raises(PlanError, match=f"would hold {case.output['swa_max_total_num_tokens']:,} tokens"):
            solve(case)
    same = [case for case in cases(NEW) if case.output is None and case.input["forced_hybrid"]]
    assert len(same) == 5


def test_a_dequantised_prompt_is_one_layer_of_fp8_per_token() -> None:
    for case in listed("new: dequantised prompt"):
        assert case.output is not None
        (call,) = set(read_spec(case.version, case.config_name).calls)
        assert isinstance(call, AttentionCall)
        on_rank = call.on_rank(case.input["tp"])
        one_layer = on_rank.kv_heads * (on_rank.key_dim + on_rank.value_dim)
        assert solve(case).coeff + one_layer == case.output["coef_cell_size"], str(case)
        assert fits(case.output, case, Fraction(case.output["coef_cell_size"]))


# -- compressed attention: what a token costs there, from the fields of our layouts


ROW_ALIGNMENT = 576  # bytes: to a multiple of it the newer version pads a page of latents of one layer
SPECULATIVE_RINGS = 2  # with speculation a ring is twice as long
RING_BLOCK = 128  # rows of a pool of request rings are a multiple of it


def is_ring(field: Field) -> bool:
    return field.per == PER_PAGE


def is_large_ring(field: Field) -> bool:
    """The ring of a layer that compresses by 128: it has a row per token."""
    return is_ring(field) and field.shape[0] == 128


def bytes_of(group: GroupSpec, wanted: Callable[[Field], bool]) -> int:
    """Bytes per frame of the fields that are wanted."""
    return sum(field.bytes_per_frame(group.layout.page_size) for field in group.layout.fields if wanted(field))


def row_padding(group: GroupSpec) -> int:
    """Bytes per frame that padding every layer's page of latents takes; 0 for an indexer, whose rows fit."""
    page_size, padding = group.layout.page_size, 0
    by_layer: dict[tuple[int, int], int] = {}
    for field in group.layout.fields:
        if not is_ring(field) and not field.name.startswith("index"):
            size = field.bytes_per_frame(page_size) // len(field.layers)
            for layer in field.layers:
                by_layer[layer, field.per] = by_layer.get((layer, field.per), 0) + size
    for size in by_layer.values():
        padding += -size % ROW_ALIGNMENT
    return padding


def price(case: Case, *, rings: Fraction, large_rings: Fraction, padded: bool) -> tuple[Fraction, Fraction]:
    """Bytes per full token in full pools, and per window token in window pools, of the target's layers.

    `rings` and `large_rings` scale what our layouts say of them.
    """
    full, window = Fraction(0), Fraction(0)
    for group in groups_of(case, case.page_size, drafts=False):
        size = Fraction(bytes_of(group, lambda field: not is_ring(field)) + (row_padding(group) if padded else 0))
        size += rings * bytes_of(group, lambda field: is_ring(field) and not is_large_ring(field))
        size += large_rings * bytes_of(group, is_large_ring)
        if group.reach.kind == "window":
            window += size / case.page_size
        else:
            full += size / case.page_size
    return full, window


def with_a_mean_layer(case: Case, size: Fraction) -> Fraction:
    """The price with one more layer that costs as much as the mean of the others."""
    layers = len(read_spec(case.version, case.config_name).layers)
    return size * Fraction(layers + 1, layers)


def fits(output: dict[str, Any], case: Case, per_token: Fraction, fixed: int | Fraction = 0) -> bool:
    """Whether the recorded tokens are what the recorded bytes hold at this price."""
    pages = max(0, int((case.available - fixed) / per_token)) // case.page_size
    return bool(output["max_total_num_tokens"] == pages * case.page_size)


def test_our_own_price_is_the_sum_of_these_parts() -> None:
    for name in ("old: rings per window", "new: rings per request"):
        for case in listed(name):
            if case.speculation is None:
                full, window = price(case, rings=Fraction(1), large_rings=Fraction(1), padded=False)
                assert solve(case).coeff == full + case.window_ratio * window


def test_rings_per_window_are_twice_our_rings_per_page() -> None:
    for case in listed("old: rings per window"):
        assert case.output is not None
        assert case.page_size == 256
        twice = Fraction(2)
        full, window = price(case, rings=twice, large_rings=twice, padded=False)
        theirs = full + case.window_ratio * window
        assert float(theirs) == case.output["coef_bytes_per_full_token"]
        assert fits(case.output, case, theirs)
        saved = {Fraction(1, 10): 4768, Fraction(1, 5): 9536, Fraction(4, 5): 38144}[case.window_ratio]
        assert theirs - solve(case).coeff == saved


def test_rings_of_drafts_are_doubled_and_every_draft_is_a_mean_layer() -> None:
    for case in listed("old: rings of drafts"):
        assert case.output is not None
        doubled = Fraction(2 * SPECULATIVE_RINGS)  # per window of a page of 256, and with speculation
        full, window = price(case, rings=doubled, large_rings=doubled, padded=False)
        theirs = with_a_mean_layer(case, full + case.window_ratio * window)
        assert float(theirs) == pytest.approx(case.output["coef_bytes_per_full_token"], rel=FLOAT_ROUNDING)
        assert fits(case.output, case, theirs)
        assert solve(case).coeff < theirs


def request_rings(case: Case, per_token: Fraction) -> int:
    """Bytes of the large rings of all requests, and one that pads, in rows of whole blocks.

    Without a number of requests, one is guessed from the tokens that would fit without rings.
    """
    spec = read_spec(case.version, case.config_name)
    guess = int(int(case.available / per_token) / spec.context_length * 512)
    requests = case.extra.get("max_running_requests") or max(2048, min(guess, 4096))
    fields = [field for group in groups_of(case, case.page_size, drafts=False) for field in group.layout.fields]
    (field,) = filter(is_large_ring, fields)
    length = RING_BLOCK * (SPECULATIVE_RINGS if case.speculation else 1)
    rows = (requests + 1) * length + length + 1
    per_row = field.bytes_per_frame(case.page_size) // field.shape[0]
    return -(-rows // RING_BLOCK) * RING_BLOCK * per_row


def test_rings_per_request_are_a_fixed_price_instead_of_one_per_token() -> None:
    refused = 0
    for case in listed("new: rings per request"):
        rings = Fraction(SPECULATIVE_RINGS if case.speculation else 1)
        full, window = price(case, rings=rings, large_rings=Fraction(0), padded=True)
        if case.speculation:
            full, window = with_a_mean_layer(case, full), with_a_mean_layer(case, window)
        output = case.output
        cap = output["coef_swa_cap_tokens"] if output is not None else None
        theirs = full if cap else full + case.window_ratio * window
        fixed = request_rings(case, theirs) + (cap or 0) * window
        if output is None:
            refused += 1
            assert fixed > case.available, str(case)
            assert solve(case).max_total_num_tokens > 0  # nothing is fixed here, so it is planned
            continue
        assert float(theirs) == pytest.approx(output["coef_bytes_per_full_token"], rel=FLOAT_ROUNDING)
        assert float(window) == pytest.approx(output["coef_bytes_per_swa_token"], rel=FLOAT_ROUNDING)
        assert fits(output, case, theirs, fixed), str(case)
    assert refused == 28


def test_the_price_of_a_token_with_rings_per_page_and_per_request() -> None:
    """The numbers of one page size and ratio: what rings per page cost, and padding does not."""
    plain = [case for case in listed("new: rings per request") if not case.extra and not case.speculation]
    case = next(case for case in plain if case.page_size == 256 and case.window_ratio == Fraction(1, 10))
    ours = solve(case).coeff
    full, window = price(case, rings=Fraction(1), large_rings=Fraction(0), padded=True)
    assert (float(ours), float(full), float(window)) == (11129.45, 3899.25, 31875.0)
    large_rings = 20 * 128 * 1024 * 4 // 256  # 20 layers, 128 rows of 1,024 float32 in a page
    full_padding, window_padding = 49, 43  # 21 layers x 64 bytes and 20 x 560, in a page; 43 x 256
    assert ours == full + Fraction(1, 10) * (window + large_rings - window_padding) - full_padding
