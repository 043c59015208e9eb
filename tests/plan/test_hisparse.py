"""HiSparse in a plan: buffers, refusals by name, the memory plan, and the break-even against resident latents."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.hisparse import warn_of_loss
from quire.errors import InvalidInput, PlanError
from quire.plan.devices import DEVICES, find_device
from quire.plan.hisparse import HiSparseCosts, hisparse_costs, hisparse_gain
from quire.plan.parallel import Parallelism
from quire.plan.plan import Plan
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.settings.setting import parse_bytes
from quire.sparse.hot_slots import HotSlots
from quire.spec.catalogue import CATALOGUE
from quire.spec.config_reader import ConfigReader
from quire.spec.hisparse import MOST_BUFFER_TOKENS, PAGE_BOUNDS, HiSparseConfig
from quire.spec.model import ModelSpec
from quire.spec.speculation import SpeculativeConfig
from quire.spec.weights import read_weights
from tests.covering import each_of
from tests.tiny_latents import LATENTS

GIB = 2**30
PAGES = {"selection": PAGE_BOUNDS, "top_k": 512}
DSA = ("deepseek-v3.2", "glm-5.1", "glm-5.2")


def spec_named(name: str) -> ModelSpec:
    return ModelSpec.from_config(CATALOGUE[name].config)


def plan_of(name: str, hisparse: dict[str, Any] | None = None, **options: Any) -> Plan:
    config = HiSparseConfig(**hisparse or {})
    return make_plan(spec_named(name), PlanSettings(**{"kv_memory": 40 * GIB, "hisparse": config, **options}))


@each_of("name", DSA)
@each_of("page_size", [1, 16, 64])
@each_of("hisparse", [{}, {"host_to_device_ratio": 4}, {"device_buffer_size": 2048}])
def test_what_is_built_is_what_is_planned(name: str, page_size: int, hisparse: dict[str, Any]) -> None:
    plan = plan_of(name, hisparse, page_size=page_size, max_model_len=65_536)
    memory = plan.memory
    assert memory.pool_bytes == plan.config.bytes <= plan.kv_bytes
    assert memory.host_bytes == plan.config.pools[0].bytes
    assert memory.max_requests == plan.hot_rows == plan.max_running_requests
    assert [group.name for group in memory.groups] == ["full", "indexer"]
    assert memory.frames_of(0) == memory.frames_of(1) == memory.num_pages == memory.device_frames_of(1)
    assert memory.device_frames_of(0) == plan.hot_rows * memory.hot_frames_per_row
    assert memory.hot is not None and memory.hot.top_k == 2048
    size = hisparse.get("device_buffer_size", 4096)
    assert memory.hot_frames_per_row * page_size > size >= (memory.hot_frames_per_row - 1) * page_size
    assert sum(line.bytes for line in plan.ledger if line.where == "device") == 40 * GIB
    assert min(line.bytes for line in plan.ledger) >= 0
    assert next(line.bytes for line in plan.ledger if line.name == "pool full") == memory.host_bytes


@pytest.mark.parametrize(
    ("context", "page", "size"), [(100, 16, 112), (4000, 16, 4000), (4097, 64, 4096), (131_072, 16, 4096)]
)
def test_a_buffer_has_twice_the_selected_tokens_and_no_more_than_the_context(
    context: int, page: int, size: int
) -> None:
    hot = plan_of("deepseek-v3.2", max_model_len=context, page_size=page).memory.hot
    assert hot is not None and hot.buffer_size == size


def test_slots_of_a_buffer_have_numbers_of_16_bits() -> None:
    hot = plan_of("llama-3.1-8b", {**PAGES, "top_k": 30_000}, max_model_len=131_072).memory.hot
    assert hot is not None and hot.buffer_size == MOST_BUFFER_TOKENS
    assert HotSlots(1, 1, MOST_BUFFER_TOKENS).buffer_size == MOST_BUFFER_TOKENS


@pytest.mark.parametrize(
    ("name", "hisparse", "options", "said"),
    [
        ("deepseek-v3", {}, {}, "no layer of DeepseekV3ForCausalLM selects latents"),
        ("llama-3.1-8b", {}, {}, "no layer of LlamaForCausalLM selects latents"),
        ("deepseek-v4-flash", {}, {}, "the indexer of DeepseekV4ForCausalLM does not select latents"),
        ("deepseek-v3.2", {"top_k": 1024}, {}, "selects 2,048 tokens"),
        ("deepseek-v3.2", {"device_buffer_size": 2047}, {}, "2,047 tokens: a step reads 2,048 selected tokens"),
        ("deepseek-v3.2", {"device_buffer_size": 111}, {"max_model_len": 100}, "reads 112 selected tokens"),
        ("llama-3.1-8b", {**PAGES, "top_k": 15}, {}, "less than a page of 16"),
        ("llama-3.1-8b", {**PAGES, "device_buffer_size": 511}, {}, "511 tokens: a step reads 512 selected tokens"),
        ("llama-3.1-8b", PAGES, {"parallel": Parallelism(pp=2)}, "--pp"),
        ("deepseek-v3.2", PAGES, {}, "has an indexer"),
        ("deepseek-v3", PAGES, {}, "has latent layers"),
        ("gemma-3-27b", PAGES, {"window_pool": False}, "windows of Gemma3"),
        (
            "llama-3.1-8b",
            PAGES,
            {"speculative_config": SpeculativeConfig(method="eagle", num_steps=2, topk=2, num_draft_tokens=4)},
            "branch",
        ),
        ("deepseek-v3.2", {}, {"parallel": Parallelism(pp=2)}, "--pp"),
        ("deepseek-v3.2", {}, {"parallel": Parallelism(tp=2, dcp=2)}, "--dcp"),
        (
            "deepseek-v3.2",
            {},
            {"speculative_config": SpeculativeConfig(method="mtp", num_steps=1, num_draft_tokens=2)},
            "draft layers of mtp",
        ),
    ],
)
def test_what_does_not_work_is_refused_by_name(
    name: str, hisparse: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        plan_of(name, hisparse, **options)
    assert caught.value.exit_code == 2 and caught.value.fix


@pytest.mark.parametrize(("name", "groups"), [("llama-3.1-8b", 2), ("gemma-3-27b", 3)])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_selected_by_bounds_are_planned_and_called_lossy(name: str, groups: int, page_size: int) -> None:
    plan = plan_of(name, {**PAGES, "top_k": 600}, page_size=page_size, max_model_len=65_536)
    memory, resident = plan.memory, plan_of_resident(name, page_size)
    assert memory.pool_bytes == plan.config.bytes <= plan.kv_bytes
    assert [group.name for group in memory.groups] == ["full", "indexer", "window"][:groups]
    full, bounds, *windows = memory.groups
    assert (full, *windows) == resident.memory.groups
    assert bounds.layout.bytes_per_frame * page_size == full.layout.bytes_per_frame
    assert memory.hot is not None and memory.hot.lossy
    assert memory.hot.top_k == 600 - 600 % page_size
    assert memory.hot.buffer_size == 2 * memory.hot.top_k
    assert "lossy" in " ".join(plan.notes) and "lossy" not in " ".join(resident.notes)
    assert memory.frames_of(0) == memory.frames_of(1) == memory.num_pages
    if page_size > 1 and not windows:
        assert memory.num_pages > resident.memory.num_pages
    gain = hisparse_gain(plan, partial(make_plan, spec_named(name)), hisparse_costs(plan))
    assert gain.resident_tokens == resident.config.max_total_num_tokens
    assert (gain.tokens > gain.resident_tokens) == (memory.num_pages > resident.memory.num_pages)


def plan_of_resident(name: str, page_size: int) -> Plan:
    return make_plan(spec_named(name), PlanSettings(kv_memory=40 * GIB, page_size=page_size, max_model_len=65_536))


def test_layers_of_other_kinds_are_refused_by_name() -> None:
    spec = spec_named("deepseek-v3.2")
    dense, plain = spec_named("deepseek-v3").layers[0], spec_named("llama-3.1-8b").layers[0]
    for other, said in ((dense, "read all latents beside sparse ones"), (plain, "has attention layers beside")):
        with pytest.raises(InvalidInput, match=said):
            make_plan(
                replace(spec, layers=(*spec.layers, other)), PlanSettings(kv_memory=GIB, hisparse=HiSparseConfig())
            )


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"])
def test_tiny_models_plan(name: str) -> None:
    config = {"max_position_embeddings": 512, "vocab_size": 64, "num_hidden_layers": 3, "hidden_size": 64}
    spec = ModelSpec.from_config(
        {**config, "num_attention_heads": 4, "num_key_value_heads": 4, "dtype": "float32", **LATENTS[name]}
    )
    settings = PlanSettings(kv_memory=4 * 2**20, hisparse=HiSparseConfig(), max_running_requests=5)
    memory = make_plan(spec, settings).memory
    assert memory.hot is not None and (memory.hot.buffer_size, memory.hot.top_k) == (16, 8)
    assert memory.max_requests == 5


def test_the_ledger_and_the_requests_follow_host_memory() -> None:
    free = plan_of("deepseek-v3.2", max_model_len=131_072)
    bounded = plan_of("deepseek-v3.2", max_model_len=131_072, latent_bytes=100 * GIB)
    assert bounded.memory.host_bytes <= 100 * GIB < free.memory.host_bytes
    assert bounded.requests_at(131_072) == bounded.config.max_total_num_tokens // 131_072
    with pytest.raises(PlanError, match="host memory") as refused:
        plan_of("deepseek-v3.2", {"host_to_device_ratio": 8}, latent_bytes=10 * GIB)
    advised = re.search("--host-memory ([0-9.]+[A-Za-z]+)", str(refused.value))
    assert advised is not None
    # An engine with that setting has tiers, which keep half of it.
    plan_of("deepseek-v3.2", {"host_to_device_ratio": 8}, latent_bytes=parse_bytes(advised[1]) // 2)


def test_ranks_and_attention_groups() -> None:
    one = plan_of("deepseek-v3.2", parallel=Parallelism(tp=8))
    assert one.config == plan_of("deepseek-v3.2").config, "every rank has all latents"
    groups = plan_of("deepseek-v3.2", parallel=Parallelism(tp=8, dp=8), max_running_requests=64)
    assert groups.max_running_requests == 64 and groups.memory.max_requests == groups.hot_rows == 8


# -- break-even


def gain(plan: Plan, **costs: Any) -> Any:
    return hisparse_gain(plan, partial(make_plan, plan.spec), HiSparseCosts(**costs))


def test_the_break_even_of_a_served_model() -> None:
    """By hand: 5 requests of 131,072 tokens fit in 38.5 GiB; a swap of 307 latents of 70,272 bytes, at 51.2 GB/s, is
    0.42 ms beside 61 times 25 us; a step reads 85.9 GB of weights in 22.4 ms."""
    config = CATALOGUE["deepseek-v3.2"].config
    spec, weights = ModelSpec.from_config(config), read_weights(ConfigReader(config))
    settings = PlanSettings(
        rank_device=find_device("h200-141gb"),
        parallel=Parallelism(tp=8),
        max_model_len=131_072,
        hisparse=HiSparseConfig(),
    )
    plan = make_plan(spec, settings, weights)
    costs = hisparse_costs(plan)
    found = hisparse_gain(plan, partial(make_plan, spec), costs)
    assert costs.link_rate == pytest.approx(0.8 * DEVICES["h200-141gb"][3] * 1e9)
    assert costs.step_s == pytest.approx(0.0229, rel=0.01)
    assert found.swapped_bytes == pytest.approx(0.15 * 2048 * 61 * 1152, abs=1)
    assert found.swap_s == pytest.approx(0.00042 + 61 * 25e-6, rel=0.01)
    assert (found.resident_requests, found.break_even, found.loses) == (5, 9, "")
    assert found.requests >= 4 * found.resident_requests
    assert hisparse_costs(plan, hit_rate=0.5, link_rate=1e9, step_s=1.0) == HiSparseCosts(
        hit_rate=0.5, link_rate=1e9, step_s=1.0
    )


@pytest.mark.parametrize(
    ("hisparse", "options", "costs", "said"),
    [
        ({}, {"max_model_len": 4096}, {}, "tokens fit"),
        ({"host_to_device_ratio": 1}, {"max_model_len": 131_072}, {}, "requests of the context fit"),
        ({"host_to_device_ratio": 8}, {"max_model_len": 4096}, {}, "requests of the context fit"),
        ({}, {"max_model_len": 131_072}, {"link_rate": 1e8, "step_s": 0.02}, "at once are slower than 4"),
    ],
)
def test_a_configuration_that_loses_says_why(
    hisparse: dict[str, Any], options: dict[str, Any], costs: dict[str, Any], said: str
) -> None:
    found = gain(plan_of("deepseek-v3.2", hisparse, **options), **costs)
    assert said in found.loses and found.break_even is None


@pytest.mark.parametrize(("context", "warns"), [(4096, True), (131_072, False)])
def test_the_engine_runs_it_with_a_warning(context: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_loss(plan_of("deepseek-v3.2", max_model_len=context), spec_named("deepseek-v3.2"))
    assert ("do not pay here" in caplog.text) == warns


def test_without_the_time_of_a_step_only_what_fits_is_compared() -> None:
    found = gain(plan_of("deepseek-v3.2", max_model_len=131_072))
    assert (found.break_even, found.loses) == (None, "") and found.requests > found.resident_requests


def test_one_request_is_enough_where_none_fits_otherwise() -> None:
    plan = plan_of("deepseek-v3.2", max_model_len=131_072, kv_memory=4 * GIB)
    found = gain(plan)
    assert found.resident_requests == 0 < found.resident_tokens and found.break_even == 1

    def nothing_fits(settings: PlanSettings) -> Plan:
        raise PlanError("no page fits.")

    found = hisparse_gain(plan, nothing_fits, HiSparseCosts())
    assert (found.resident_requests, found.resident_tokens, found.break_even) == (0, 0, 1)


@given(st.floats(0.0, 1.0), st.floats(1e8, 1e12), st.floats(1e-4, 1.0), st.floats(0.0, 1e-2))
def test_the_break_even_is_where_tokens_per_second_cross(hit: float, link: float, step: float, each: float) -> None:
    """Whatever a request adds to a step in both plans."""
    plan = _PLAN
    found = hisparse_gain(plan, lambda settings: _RESIDENT, HiSparseCosts(hit_rate=hit, link_rate=link, step_s=step))

    def rate(requests: int, swap: float) -> float:
        return requests / (step + requests * (each + swap))

    resident = rate(found.resident_requests, 0.0)
    faster = [count for count in range(1, found.requests + 1) if rate(count, found.swap_s) > resident * (1 + 1e-9)]
    if found.break_even is None:
        assert not faster and found.loses
    else:
        assert found.break_even <= found.requests and not found.loses
        assert rate(found.break_even, found.swap_s) >= resident * (1 - 1e-9)
        assert not faster or abs(faster[0] - found.break_even) <= 1


_PLAN = plan_of("deepseek-v3.2", max_model_len=131_072)
_RESIDENT = make_plan(_PLAN.spec, _PLAN.settings.changed(hisparse=None))
