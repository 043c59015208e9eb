"""The planner: real configurations, ledgers that add up, limits that move the right way, and advice that works."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.cache import KVCache
from quire.cli.plan_request import PlanRequest
from quire.errors import InvalidInput, PlanError, QuireError, UnsupportedModel
from quire.plan import budget, planner
from quire.plan.advice import least_memory, options_to_fit
from quire.plan.budget import MemoryPlan
from quire.plan.devices import DEVICES, Line, find_device, graph_bytes
from quire.plan.mix import Mix, mix_of, uniform
from quire.plan.parallel import Parallelism
from quire.plan.plan import Plan, size_within
from quire.plan.planner import make_plan
from quire.plan.report import arena_as_dict, explain, plan_as_dict
from quire.plan.settings import PlanSettings
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.settings.setting import parse_bytes
from quire.spec.catalogue import CATALOGUE
from quire.spec.config_reader import ConfigReader
from quire.spec.layers import AttentionCall
from quire.spec.layout import PER_PAGE, DType
from quire.spec.model import ModelSpec
from quire.spec.speculation import SpeculativeConfig
from quire.spec.weights import read_weights
from quire.testing import small_plan
from tests.changes import SPECS, slow_unless_changed
from tests.covering import each_of
from tests.plan.check import random_case, spec_of

GIB = 2**30
SHARED = Path(__file__).parents[3] / "shared" / "data"
CONFIGS = sorted((SHARED / "configs").glob("*.json"))

needs_shared = pytest.mark.skipif(not CONFIGS, reason="the published configurations are not beside the repository")


def catalogue_spec(name: str) -> ModelSpec:
    return ModelSpec.from_config(CATALOGUE[name].config)


def plan_of(name: str, **options: Any) -> Plan:
    return make_plan(catalogue_spec(name), PlanSettings(**{"kv_memory": 40 * GIB, **options}))


def device_total(plan: Plan) -> int:
    return sum(line.bytes for line in plan.ledger if line.where == "device")


# -- real models


@needs_shared
def test_all_published_configurations_are_there() -> None:
    assert len(CONFIGS) == 74


@slow_unless_changed(*SPECS)
@needs_shared
@each_of("path", CONFIGS)
def test_a_published_configuration_plans(path: Path) -> None:
    config = json.loads(path.read_text())
    spec = ModelSpec.from_config(config)
    weights = read_weights(ConfigReader(config))
    plan = make_plan(spec, PlanSettings(kv_memory=64 * GIB), weights)
    assert device_total(plan) == 64 * GIB
    assert 0 < plan.config.bytes <= 64 * GIB
    assert all(line.bytes >= 0 for line in plan.ledger)
    assert weights.num_parameters > 10**8
    assert explain(plan) and plan_as_dict(plan)["pools"]


@each_of("name", CATALOGUE)
def test_a_catalogue_model_plans(name: str) -> None:
    plan = plan_of(name, kv_memory=256 * GIB, max_model_len=1024)
    assert device_total(plan) == 256 * GIB
    assert plan.fits


def test_planning_does_no_more_for_more_memory() -> None:
    """No loop runs over tokens or pages."""
    for name in CATALOGUE:
        _, small, large = (lines_run(partial(plan_of, name, kv_memory=gib * GIB)) for gib in (400, 400, 4000))
        assert large < 1.1 * small, name


def lines_run(run: Callable[[], object]) -> int:
    """Lines of Python that `run` executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys; from quire.cli.plan_request import PlanRequest; "
        "asked = PlanRequest.read({'model': 'llama-3.1-70b', 'gpu': 'h100-80gb', 'tp': 4}); "
        "asked.planned_model().plan(asked.settings()); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- ledgers


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v3.2", "deepseek-v4-flash"]
)
@pytest.mark.parametrize("options", [{}, {"swa_full_tokens_ratio": Fraction(1, 2)}, {"max_total_tokens": 4096}])
def test_the_ledger_adds_up_to_the_budget(name: str, options: dict[str, Any]) -> None:
    plan = plan_of(name, **options)
    assert device_total(plan) == plan.kv_bytes == 40 * GIB
    named = {line.name: line.bytes for line in plan.ledger}
    padding = sum(pool.bytes_per_frame for pool in plan.config.pools)
    assert named["padding"] == padding
    assert plan.config.bytes == padding + sum(b for name, b in named.items() if name.startswith("pool "))
    assert named["request tables"] == plan.memory.row_bytes


def test_a_devices_ledger_has_a_line_for_everything() -> None:
    config = CATALOGUE["llama-3.1-70b"].config
    weights = read_weights(ConfigReader(config))
    options = PlanSettings(rank_device=find_device("h100-80gb"), parallel=Parallelism(tp=4))
    plan = make_plan(ModelSpec.from_config(config), options, weights)
    assert device_total(plan) == find_device("h100-80gb").memory
    names = [line.name for line in plan.ledger]
    assert names == [
        "weights", "driver", "activations", "graphs", "workspace", "reserve", "pool full", "padding", "unused",
        "request tables",
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "per_request"), [("llama-3.1-8b", 2**21), ("gemma-3-27b", 8 * 262_208 + 2**20)])
def test_graphs_have_room_for_the_logits_of_a_large_vocabulary(name: str, per_request: int) -> None:
    """Logits in float32 twice: those of Gemma 2 are capped, beside the others."""
    asked = PlanSettings(
        rank_device=find_device("h200-141gb"), weight_bytes=60 * GIB, concurrency=8, max_model_len=4096
    )
    plan = make_plan(catalogue_spec(name), asked)
    assert next(line.bytes for line in plan.ledger if line.name == "graphs") == 8 * per_request
    assert graph_bytes(256, catalogue_spec(name).vocab_size) == 256 * per_request


def test_a_fraction_is_given_back_in_bytes() -> None:
    options = PlanSettings(rank_device=find_device("a100-80gb"), mem_fraction_static=0.5, weight_bytes=16 * GIB)
    plan = make_plan(catalogue_spec("llama-3.1-8b"), options)
    assert plan.kv_bytes == 24 * GIB
    assert any("40.00 GiB" in note for note in plan.notes)


def test_what_was_measured_replaces_the_estimate() -> None:
    lines = (Line(name="weights", bytes=GIB, why="measured"),)
    options = PlanSettings(rank_device=find_device("t4"), measured=lines)
    assert plan_lines(make_plan(catalogue_spec("qwen2.5-0.5b"), options))[0] == lines[0]


def plan_lines(plan: Plan) -> tuple[Line, ...]:
    return plan.ledger


def test_weights_that_leave_nothing_are_refused_with_every_line() -> None:
    options = PlanSettings(rank_device=find_device("rtx-4090"), weight_bytes=30 * GIB)
    with pytest.raises(PlanError, match=r"weights 30.00 GiB.*leaves nothing for pools") as caught:
        make_plan(catalogue_spec("llama-3.1-8b"), options)
    assert "--tp" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "options", "fix"),
    [
        ("llama-3.1-405b", {}, "use --tp 16 (16 devices), or use --pp 16 (16 devices)."),
        (
            "llama-3.1-70b",
            {"kv_memory": GIB},
            "use --tp 2 (2 devices), or use --pp 2 (2 devices), or use h200-141gb (1",
        ),
        ("llama-3.1-8b", {"kv_memory": 75 * GIB}, "ask for --kv-memory 62051MiB or less, or use h20-96gb (95.58 GiB)."),
        (
            "llama-3.1-8b",
            {"mem_fraction_static": 0.1},
            "raise --mem-fraction-static to 0.39, or use --tp 4 (4 devices), ",
        ),
    ],
)
def test_what_makes_room_on_a_device_was_planned(name: str, options: dict[str, Any], fix: str) -> None:
    """Each change works when it is followed, and a smaller one does not."""
    config, device = CATALOGUE[name].config, find_device("h100-80gb")
    spec, weights = ModelSpec.from_config(config), read_weights(ConfigReader(config))
    asked = PlanSettings(rank_device=device, **options)
    with pytest.raises(PlanError) as caught:
        make_plan(spec, asked, weights)
    assert caught.value.fix.startswith(fix)

    def works(**changed: Any) -> bool:
        try:
            plan = make_plan(spec, asked.changed(**changed), weights)
        except PlanError:
            return False
        return plan.fits or asked.kv_memory is not None

    for way, number in re.findall(r"--([\w-]+) ([\d.]+)", caught.value.fix):
        if way in ("tp", "pp"):
            assert works(parallel=Parallelism(**{way: int(number)}))
            assert not works(parallel=Parallelism(**{way: int(number) // 2}))
        elif way == "kv-memory":
            assert works(kv_memory=int(number) * 2**20) and not works(kv_memory=(int(number) + 1) * 2**20)
        else:
            assert works(mem_fraction_static=float(number))
            assert not works(mem_fraction_static=float(number) - 0.01)
    for larger in re.findall(r"use ([\w-]+gb)", caught.value.fix):
        assert works(rank_device=find_device(larger))


def test_weights_given_per_rank_are_told_how_small_they_must_be() -> None:
    asked = PlanSettings(rank_device=find_device("rtx-4090"), weight_bytes=30 * GIB, max_model_len=8192)
    with pytest.raises(PlanError) as caught:
        make_plan(catalogue_spec("llama-3.1-8b"), asked)
    found = re.search(r"until a rank has ([\d,]+) MiB of weights", caught.value.fix)
    assert found is not None
    most = int(found[1].replace(",", "")) * 2**20
    assert make_plan(catalogue_spec("llama-3.1-8b"), asked.changed(weight_bytes=most)).fits
    with pytest.raises(PlanError):
        make_plan(catalogue_spec("llama-3.1-8b"), asked.changed(weight_bytes=most + 3 * GIB))


@pytest.mark.parametrize("mix", [None, uniform(512, "short requests"), uniform(60_000, "long requests")])
@pytest.mark.parametrize("device", ["l4", "h100-80gb"])
def test_graphs_are_priced_for_the_expected_requests_that_fit(device: str, mix: Mix | None) -> None:
    """Not for requests of the full context alone, of which there are fewest."""
    spec, weights = catalogue_spec("llama-3.1-8b"), read_weights(ConfigReader(CATALOGUE["llama-3.1-8b"].config))
    plan = make_plan(spec, PlanSettings(rank_device=find_device(device), mix=mix, max_model_len=131_072), weights)
    graphs = next(line for line in plan.ledger if line.name == "graphs")
    num_graphs = graphs.bytes // 2**21
    held = max(1, plan.requests_at(plan.mix.mean))
    assert plan.requests_at(plan.context) <= held <= num_graphs <= 256
    assert num_graphs == 256 or num_graphs - held <= 2
    assert num_graphs == 256 or f"graphs are for {num_graphs:,} request" in " ".join(plan.notes)
    if mix is not None and mix.mean < 60_000:
        assert num_graphs > 4 * max(1, plan.requests_at(plan.context))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_memory": None}, "needs bytes to split"),
        ({"max_model_len": 10**9}, "is beyond the model's"),
        ({"kv_memory": 1000}, "cannot hold one page"),
        ({"kv_dtype": "int3"}, "is not a KV dtype"),
        ({"parallel": Parallelism(tp=3)}, "8 KV heads cannot be split over 3 ranks"),
        ({"parallel": Parallelism(tp=8, dcp=2)}, "leave no 2 ranks with the same"),
        ({"parallel": Parallelism(pp=64)}, "32 layers cannot be 64 stages"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(QuireError, match=said):
        plan_of("llama-3.1-8b", **options)


# -- parallelism


@pytest.mark.parametrize(("tp", "bytes_per_token"), [(1, 131_072), (2, 65_536), (8, 16_384), (16, 16_384)])
def test_heads_are_split_and_then_repeated(tp: int, bytes_per_token: int) -> None:
    assert plan_of("llama-3.1-8b", parallel=Parallelism(tp=tp)).bytes_per_token == bytes_per_token


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_latents_are_held_by_every_rank(tp: int) -> None:
    assert plan_of("deepseek-v3", parallel=Parallelism(tp=tp)).bytes_per_token == 70_272


@pytest.mark.parametrize("dcp", [1, 2, 8])
def test_ranks_that_share_pages_hold_more_tokens(dcp: int) -> None:
    plan = plan_of("deepseek-v3", parallel=Parallelism(tp=8, dcp=dcp))
    assert plan.bytes_per_token == Fraction(70_272, dcp)
    assert plan.config.max_total_num_tokens % (16 * dcp) == 0
    assert plan.minimum_reusable_prefix == 16 * dcp


def test_attention_groups_share_heads_among_fewer_ranks() -> None:
    assert plan_of("llama-3.1-8b", parallel=Parallelism(tp=8, dp=4)).bytes_per_token == 65_536


def test_the_stage_with_the_least_room_decides() -> None:
    even = plan_of("llama-3.1-8b", parallel=Parallelism(pp=2))
    uneven = plan_of("llama-3.1-8b", parallel=Parallelism(pp=2, pp_layers=(12, 20)))
    assert even.bytes_per_token == 131_072 / 2
    assert (uneven.bytes_per_token, uneven.stage) == (131_072 * 20 / 32, 1)
    assert uneven.config.max_total_num_tokens < even.config.max_total_num_tokens


@slow_unless_changed(*SPECS)
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v4-flash", "jamba-1.5-mini"]
)
@pytest.mark.parametrize("slots", [None, 60])
def test_a_pipeline_of_any_depth_holds_what_all_its_stages_hold(name: str, slots: int | None) -> None:
    """Some stages have windows or states alone; none of them may stand for the server."""
    spec = catalogue_spec(name)
    few: Plan | None = None
    for pp in (1, 2, 4, 8, 16, len(spec.layers)):
        options = PlanSettings(
            kv_memory=64 * GIB,
            max_model_len=4096,
            parallel=Parallelism(pp=pp),
            max_running_requests=2**16,
            max_mamba_cache_size=slots,
        )
        plan = make_plan(spec, options)
        tokens = plan.config.max_total_num_tokens
        assert plan.requests_at(4096) <= tokens // 4096 + 1
        assert all(stage.max_total_num_tokens == tokens and stage.bytes <= 64 * GIB for stage in plan.stages)
        assert device_total(plan) == 64 * GIB
        if few is not None:
            assert tokens >= 0.99 * few.config.max_total_num_tokens, f"{pp} stages hold less than fewer do"
            assert plan.full_tokens == tokens or few.full_tokens is None
        few = plan


def test_attention_groups_hold_attention_more_often() -> None:
    config = CATALOGUE["deepseek-v3"].config
    weights = read_weights(ConfigReader(config))
    sizes = []
    for dp in (1, 8):
        options = PlanSettings(rank_device=find_device("h200"), parallel=Parallelism(tp=8, dp=dp))
        sizes.append(make_plan(ModelSpec.from_config(config), options, weights).ledger[0].bytes)
    assert sizes[1] - sizes[0] > 8 * GIB


def test_requests_are_those_of_all_attention_groups() -> None:
    one = plan_of("llama-3.1-8b", max_model_len=32_768, parallel=Parallelism(tp=8))
    groups = plan_of("llama-3.1-8b", max_model_len=32_768, concurrency=64, parallel=Parallelism(tp=8, dp=8))
    assert one.requests_at(32_768) == 79
    assert groups.requests_at(32_768) == 64 and groups.fits
    assert groups.memory.max_requests == 8


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_cover_every_layer_once(layers: int, pp: int) -> None:
    assume(layers >= pp)
    stages = Parallelism(pp=pp).stages(layers)
    assert [i for stage in stages for i in range(stage.start, stage.stop)] == list(range(layers))
    sizes = [stage.stop - stage.start for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] <= max(sizes) and sizes[-1] == min(sizes)


def test_a_stage_of_windows_admits_no_request_that_another_stage_cannot_keep() -> None:
    """Requests pass pages in windows; the stage with the other layers keeps them whole, whichever stage decides."""
    full = AttentionCall(kv_heads=8, key_dim=128, value_dim=128)
    layers = ((full,),) * 6 + ((replace(full, window=128),),) * 5
    spec = ModelSpec(architecture="test", layers=layers, context_length=4096, vocab_size=8, dtype=DType.BFLOAT16)
    wanted = PlanSettings(
        max_model_len=3745, mix=uniform(613, "short"), enable_prefix_caching=False, parallel=Parallelism(tp=2, pp=2)
    )
    plans = [make_plan(spec, wanted.changed(kv_memory=size << 20)) for size in range(24, 33)]
    assert {plan.stage for plan in plans} == {0, 1}
    for plan in plans:
        assert plan.largest_request == plan.memory.largest_request == plan.config.max_total_num_tokens + 1


# -- speculation


def test_draft_layers_are_priced() -> None:
    speculation = SpeculativeConfig(method="eagle", num_steps=3, num_draft_tokens=4)
    assert plan_of("deepseek-v3", speculative_config=speculation).bytes_per_token == 70_272 * Fraction(62, 61)
    assert plan_of("llama-3.1-8b", speculative_config=speculation).bytes_per_token == 131_072 * Fraction(33, 32)
    ngram = replace(speculation, method="ngram")
    assert plan_of("llama-3.1-8b", speculative_config=ngram).bytes_per_token == 131_072


def test_features_of_a_head_are_priced() -> None:
    """Two vectors for each position that a head may lack: of a page, a step, and one more."""
    settings = {
        "concurrency": 4,
        "max_model_len": 8192,
        "kv_memory": None,
        "rank_device": find_device("h100-80gb"),
        "page_size": 32,
    }
    speculation = SpeculativeConfig(method="eagle3", num_steps=3, num_draft_tokens=4, model="head")
    plan = plan_of("llama-3.1-8b", weight_bytes=16 * GIB, speculative_config=speculation, **settings)
    expected = 4 * 2 * (32 + 4 + 1) * 4096 * 2
    assert plan.memory.feature_bytes == expected
    assert [line.bytes for line in plan.ledger if line.name == "draft features"] == [expected]
    assert device_total(plan) == plan.settings.rank_device.memory
    for method in ("ngram", "draft_model"):
        other = plan_of(
            "llama-3.1-8b", weight_bytes=16 * GIB, speculative_config=replace(speculation, method=method), **settings
        )
        assert other.memory.feature_bytes == 0 and all(line.name != "draft features" for line in other.ledger)


def test_compressors_keep_longer_rings_where_drafts_may_be_taken_back() -> None:
    ngram = SpeculativeConfig(method="ngram", num_steps=3, num_draft_tokens=4)
    rings = [
        sum(f.bytes_per_frame(128) for pool in plan.config.pools for f in pool.group.layout.fields if f.per == PER_PAGE)
        for plan in (plan_of("deepseek-v4-flash"), plan_of("deepseek-v4-flash", speculative_config=ngram))
    ]
    assert rings[1] == 2 * rings[0] > 0


@pytest.mark.parametrize("dcp", [1, 2, 8])
def test_admission_knows_that_ranks_share_pages(dcp: int) -> None:
    plan = plan_of("deepseek-v3", kv_memory=8 * GIB, max_model_len=131_072, parallel=Parallelism(tp=8, dcp=dcp))
    assert plan.memory.num_tokens == plan.config.max_total_num_tokens
    assert plan.memory.largest_request == plan.largest_request
    assert plan.memory.pages_per_row == -(-(131_072 + 4) // (16 * dcp))
    assert plan.memory.pool_bytes == plan.config.bytes


def admits_two_of_40() -> bool:
    """Whether two requests of 40 tokens that may draw 60 run at once in 8 pages of 16 tokens."""
    cache = KVCache(MemoryPlan(page_size=16, groups=small_plan(8, 16).groups, num_pages=8, context=128, max_requests=2))
    scheduler = Scheduler(cache, scheduling_policy("fcfs"), max_running=2, max_tokens=128)
    for index in range(2):
        prompt = np.arange(40, dtype=np.int32) + 40 * index
        params = SamplingParams(max_tokens=60)
        scheduler.add(Request(str(index), prompt, params, max_tokens=60, stop_ids=frozenset(), index=0))
    return len(scheduler.schedule()) == 2


def test_the_reserve_is_computed_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planner, row widths and admission all move when the three functions do."""
    before = plan_of("gemma-3-27b")
    rows, tokens = before.memory.pages_per_row, before.memory.tokens_per_step
    monkeypatch.setattr(budget, "get_req_to_token_extra_context_len", lambda speculation, page_size: 4 + 1600)
    monkeypatch.setattr(budget, "get_alloc_len_per_decode", lambda speculation, page_size: 64)
    monkeypatch.setattr("quire.plan.settings.get_alloc_reserve_per_decode", lambda speculation, page_size: 1024)
    after = plan_of("gemma-3-27b")
    assert after.memory.pages_per_row == rows + 100
    assert (tokens, after.memory.tokens_per_step) == (1, 64)
    assert after.config.swa_max_total_num_tokens > before.config.swa_max_total_num_tokens
    assert not admits_two_of_40(), "the next step of both takes 5 pages more than there are"
    monkeypatch.undo()
    assert admits_two_of_40()
    sources = Path(planner.__file__).parents[1].rglob("*.py")
    spelled = [str(path.name) for path in sources if "speculation.topk" in path.read_text()]
    assert spelled == ["speculation.py"]


# -- limits

models = st.sampled_from(
    [
        "llama-3.1-8b",
        "gemma-3-27b",
        "gpt-oss-20b",
        "mimo-v2-flash",
        "deepseek-v3.2",
        "nemotron-3-nano-30b-a3b",
        "mistral-7b-v0.1",
    ]
)


@slow_unless_changed(*SPECS)
@given(models, st.integers(8, 200), st.integers(8, 200), st.integers(1, 131_072))
@settings(max_examples=60)
def test_more_memory_never_serves_less(name: str, one: int, other: int, context: int) -> None:
    spec = catalogue_spec(name)
    context = min(context, spec.context_length)
    small, large = (
        make_plan(spec, PlanSettings(kv_memory=size * GIB, max_model_len=context)) for size in sorted((one, other))
    )
    assert small.requests_at(context) <= large.requests_at(context)
    assert small.largest_request <= large.largest_request
    assert not small.fits or large.fits


@slow_unless_changed(*SPECS)
@given(models, st.integers(1, 131_072), st.integers(1, 131_072))
@settings(max_examples=60)
def test_longer_requests_never_fit_more_often(name: str, one: int, other: int) -> None:
    """With pools as they are. Where the load decides the split, a longer load also gives more tokens."""
    plan = plan_of(name)
    short, long = sorted((min(one, plan.context), min(other, plan.context)))
    assert plan.requests_at(short) >= plan.requests_at(long) >= 0


@slow_unless_changed(*SPECS)
@given(models, st.integers(1, 2_000), st.integers(1, 2_000), st.sampled_from([1024, 8192, 32768]))
@settings(max_examples=60)
def test_more_requests_never_fit_where_fewer_do_not(name: str, one: int, other: int, context: int) -> None:
    few, many = (plan_of(name, concurrency=count, max_model_len=context) for count in sorted((one, other)))
    assert few.requests_at(context) <= many.requests_at(context), "who asks for more gets less"
    assert few.fits or not many.fits
    assert many.requests_at(context) <= many.max_running_requests <= max(one, other)


def check_budget(seed: int) -> bool:
    """A random model, split in random ways: no rank takes more than it may, and no line of a ledger is negative."""
    rng = random.Random(seed)
    case = random_case(rng)
    spec = spec_of(case)
    budget = int(2 ** rng.uniform(20, 32))
    base = PlanSettings(
        kv_memory=budget,
        kv_dtype=case.kept,
        max_model_len=int(2 ** rng.uniform(4, 17)),
        page_size=case.page,
        max_num_batched_tokens=rng.choice([1, 64, 2048]),
        parallel=Parallelism(tp=case.tp, dcp=case.dcp, pp=rng.randint(1, min(4, len(spec.layers)))),
        concurrency=rng.choice([None, None, 3, 50]),
        swa_full_tokens_ratio=rng.choice([None, case.ratio]),
        mamba_full_memory_ratio=rng.choice([None, Fraction(1, 10), Fraction(3)]),
        speculative_config=rng.choice([None, SpeculativeConfig(method="eagle", num_steps=3, num_draft_tokens=4)]),
        max_total_tokens=rng.choice([None, None, rng.randint(64, 2**20)]),
    )
    try:
        plan = make_plan(spec, base)
    except PlanError:
        return False
    for stage in plan.stages:
        assert stage.bytes <= budget, f"seed {seed}: {stage.bytes - budget:,} bytes too many: {stage}"
    assert min(line.bytes for line in plan.ledger) >= 0, f"seed {seed}: {plan.ledger}"
    assert plan.largest_request >= 0 <= plan.requests_at(plan.context), f"seed {seed}"
    return True


@slow_unless_changed(*SPECS)
def test_budgets_of_random_models() -> None:
    assert sum(check_budget(seed) for seed in range(600)) > 500


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_budgets_of_a_hundred_thousand_random_models() -> None:
    assert sum(check_budget(seed) for seed in range(100_000)) > 80_000


def check_limits(seed: int) -> bool:
    """A random model in a random budget: requests fall with their length, rise with bytes and never with the asking."""
    rng = random.Random(seed)
    case = random_case(rng)
    budget = int(2 ** rng.uniform(20, 36))
    context = int(2 ** rng.uniform(4, 17))
    base = PlanSettings(
        kv_memory=budget,
        kv_dtype=case.kept,
        max_model_len=context,
        page_size=case.page,
        parallel=Parallelism(tp=case.tp, dcp=case.dcp, pp=rng.choice([1, 1, 2])),
        mix=uniform(rng.randint(1, context), "random requests"),
        enable_prefix_caching=rng.random() < 0.8,
    )
    spec = spec_of(case)
    if base.parallel.pp > len(spec.layers):
        return False

    def planned(**changes: Any) -> Plan | None:
        try:
            return make_plan(spec, base.changed(**changes))
        except PlanError:
            return None

    plan = planned()
    if plan is None:
        return False
    counts = [plan.requests_at(length) for length in sorted(rng.randint(1, context) for _ in range(4))]
    assert counts == sorted(counts, reverse=True) and min(counts) >= 0, f"seed {seed}: {counts}"
    more = planned(kv_memory=budget + rng.randint(0, budget))
    assert more is not None and more.requests_at(context) >= plan.requests_at(context), f"seed {seed}"
    assert more.largest_request >= plan.largest_request, f"seed {seed}"
    few, many = sorted(int(2 ** rng.uniform(0, 9)) for _ in range(2))
    asked = [planned(concurrency=count) for count in (few, many)]
    found = [one.requests_at(context) if one is not None else 0 for one in asked]
    assert found[0] <= found[1] and found[0] <= few, f"seed {seed}: {few} and {many} asked for, {found} held"
    assert all(line.bytes >= 0 for line in plan.ledger) and device_total(plan) == budget
    return True


@slow_unless_changed(*SPECS)
def test_limits_of_random_models() -> None:
    assert sum(check_limits(seed) for seed in range(400)) > 250


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_limits_of_a_hundred_thousand_random_models() -> None:
    assert sum(check_limits(seed) for seed in range(100_000)) > 60_000


@slow_unless_changed(*SPECS)
@given(models, st.integers(1, 300), st.sampled_from([1024, 8192, 32768]), st.sampled_from(["bytes", "cap", "device"]))
@settings(max_examples=40)
def test_advice_works_when_it_is_followed(name: str, concurrency: int, context: int, where: str) -> None:
    spec = catalogue_spec(name)
    weights = read_weights(ConfigReader(CATALOGUE[name].config))
    budgets = {
        "bytes": {"kv_memory": 8 * GIB},
        "cap": {"kv_memory": 400 * GIB, "max_total_tokens": 20_000},
        "device": {"rank_device": find_device("h200"), "parallel": Parallelism(tp=8)},
    }
    wanted = PlanSettings(concurrency=concurrency, max_model_len=context, **budgets[where])
    try:
        plan = make_plan(spec, wanted, weights)
    except PlanError:
        return  # weights alone are more than the device
    options = options_to_fit(plan, lambda changed: make_plan(spec, changed, weights)) if not plan.fits else ()
    for option in options:
        number = option.value.replace(",", "")
        changed = {
            "context": lambda n=number: plan.settings.changed(max_model_len=int(n)),
            "concurrency": lambda n=number: plan.settings.changed(concurrency=int(n)),
            "KV dtype": lambda n=number: plan.settings.changed(kv_dtype=n),
            "KV memory": lambda n=number: plan.settings.changed(kv_memory=parse_bytes(n)),
            "max-total-tokens": lambda n=number: plan.settings.changed(max_total_tokens=int(n)),
            "tp": lambda n=number: plan.settings.changed(parallel=replace(plan.settings.parallel, tp=int(n))),
        }[option.change]()
        assert make_plan(spec, changed, weights).fits, option
        if option.change == "concurrency":
            one_more = plan.settings.changed(concurrency=int(number) + 1)
            assert not make_plan(spec, one_more, weights).fits, f"{option}, and one more fits"
    assert plan.fits or where != "bytes" or any(option.change == "KV memory" for option in options)


def test_the_least_memory_is_enough_and_a_mib_less_is_not() -> None:
    spec = catalogue_spec("gemma-3-27b")
    wanted = PlanSettings(max_model_len=32_768, concurrency=16)
    size = least_memory(wanted, lambda changed: make_plan(spec, changed))
    assert size is not None
    assert make_plan(spec, wanted.changed(kv_memory=size)).fits
    assert not make_plan(spec, wanted.changed(kv_memory=size - 2**20)).fits


def test_admission_uses_the_plans_limits() -> None:
    plan = plan_of("llama-3.1-8b", kv_memory=2**20 * 512)
    assert plan.largest_request == plan.memory.largest_request == plan.config.max_total_num_tokens + 1
    plan.memory.check_request(plan.largest_request - 1, 1)
    with pytest.raises(QuireError, match="can never hold more than"):
        plan.memory.check_request(plan.largest_request, 1)


# -- the expected load


def mix_in(trace: Path) -> Mix:
    mix = PlanRequest(trace=str(trace)).settings().mix
    assert mix is not None
    return mix


def test_a_trace_decides_the_split(tmp_path: Path) -> None:
    lines = [{"input_length": 500, "output_length": 12}, {"input_length": 60_000, "output_length": 4_000}]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    mix = mix_in(path)
    assert mix.counts == ((512, 1), (64_000, 1))
    table = tmp_path / "trace.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,500,12\n2023-11-16 18:17:04,60000,4000\n"
    )
    assert mix_in(table).counts == mix.counts
    assert plan_of("gemma-3-27b", mix=mix).config.swa_max_total_num_tokens > 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]\n",
        "{\n",
        '{"other": 1}\n',
        '{"input_length": "many"}\n',
        '{"input_length": [1]}\n',
        '{"input_length": Infinity}\n',
        '{"input_length": NaN}\n',
        '{"input_length": -500, "output_length": 1000}\n',
        '{"input_length": 1e30}\n',
        "[" * 100_000,
    ],
)
def test_a_trace_without_lengths_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"trace\.jsonl"):
        mix_in(path)
    with pytest.raises(InvalidInput, match=r"no trace file .*absent\.jsonl"):
        mix_in(tmp_path / "absent.jsonl")


def test_many_lengths_are_taken_together_without_losing_a_token() -> None:
    lengths = range(1, 50_001)
    many, few = mix_of(lengths, "x"), Mix(tuple((length, 1) for length in lengths), "x")
    assert len(many.counts) <= 1024 and many.num_requests == 50_000
    assert many.mean == pytest.approx(few.mean, rel=1e-4)
    assert float(many.window_share(1024, 16)) == pytest.approx(float(few.window_share(1024, 16)), rel=1e-3)


@pytest.mark.skipif(not (SHARED / "traces").exists(), reason="the recorded traces are not beside the repository")
def test_recorded_traces_are_read() -> None:
    assert mix_in(SHARED / "traces" / "mooncake" / "conversation_trace.jsonl").num_requests == 12_031
    assert mix_in(SHARED / "traces" / "azure" / "AzureLLMInferenceTrace_code.csv").num_requests == 8_819


def test_a_mix_counts_whole_pages() -> None:
    assert mix_of([100, 10], "x").window_share(32, 16) == Fraction(1 + 2, 1 + 7)
    assert uniform(100, "x").requests_per_token(16) == Fraction(1, 112)
    with pytest.raises(InvalidInput, match="no tokens"):
        Mix((), "x")


# -- names


@pytest.mark.parametrize("name", ["h100-80gb", "H100", "h200", "L4", "rtx 4090", "RTX_4090_24GB"])
def test_devices_are_found_by_name(name: str) -> None:
    assert find_device(name).name in DEVICES


@pytest.mark.parametrize(("name", "close"), [("a100", "a100-40gb"), ("h1000", "h100"), ("abacus", "--device-memory")])
def test_an_unknown_device_names_close_ones(name: str, close: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        find_device(name)
    assert close in caught.value.fix


def test_a_model_without_memory_needs_no_plan() -> None:
    spec = ModelSpec(architecture="mlp", layers=((), ()), context_length=8, vocab_size=8, dtype=DType.FLOAT32)
    with pytest.raises(InvalidInput, match="keeps anything"):
        make_plan(spec, PlanSettings(kv_memory=GIB))


def test_windows_of_two_lengths_have_pools_of_their_own() -> None:
    calls = [AttentionCall(kv_heads=1, key_dim=64, value_dim=64, window=window) for window in (0, 512, 2048)]
    spec = ModelSpec(
        architecture="two windows", layers=tuple((call,) for call in calls), context_length=65_536, vocab_size=8,
        dtype=DType.BFLOAT16,
    )  # fmt: skip
    plan = make_plan(spec, PlanSettings(kv_memory=GIB))
    assert [pool.name for pool in plan.config.pools] == ["full", "window-2048", "window-512"]
    assert plan.config.pools[1].frames > plan.config.pools[2].frames


def test_a_refused_configuration_names_the_field() -> None:
    with pytest.raises(UnsupportedModel, match="retention_heads"):
        ModelSpec.from_config({**CATALOGUE["llama-3.1-8b"].config, "retention_heads": 4})


def test_an_arena_of_an_indexer_and_windows_has_smaller_sizes() -> None:
    """Latents and keys of indexers are two pools, and one group of the arena."""
    plan = plan_of("deepseek-v4-flash", kv_memory=60 * GIB, arena=True)
    assert [group.name for group in plan.memory.groups] == ["full", "window"]
    half = size_within(plan, plan.memory.pool_bytes // 2)
    assert half.arena is not None and len(half.groups) == len(half.frames) == len(half.at_rest) == 2
    assert 0.4 < half.pool_bytes / plan.memory.pool_bytes <= 0.5
    apart = size_within(plan_of("deepseek-v4-flash", kv_memory=60 * GIB), 30 * GIB)
    assert len(apart.groups) == 3 and apart.pool_bytes <= 30 * GIB


@needs_shared
def test_an_arena_holds_no_fewer_of_any_length() -> None:
    """What fits is told for the expected requests and for the extremes, beside split pools of the same bytes."""
    shared = 0
    for file in CONFIGS:
        spec = ModelSpec.from_config(json.loads(file.read_text()))
        try:
            plan = make_plan(spec, PlanSettings(kv_memory=60 * GIB, max_model_len=min(spec.context_length, 16_384)))
        except QuireError:
            continue
        found = arena_as_dict(plan)
        floating = plan.floating
        assert (found is None) == (floating.arena is None) == (floating == plan.memory)
        if found is None:
            continue
        shared += 1
        assert floating.pool_bytes == found["bytes"] == plan.kv_bytes
        assert 0 <= found["waste_bytes"] <= 2 * sum(floating.arena.strides)
        assert plan.memory.largest_request <= floating.largest_request
        assert all(each["arena"] >= each["split"] - 1 for each in found["fits"]), (file.name, found)
        assert any(each["arena"] > 1.1 * each["split"] for each in found["fits"]), (file.name, found)
        assert any("one arena of these bytes" in note for note in plan.notes)
    assert shared > 20
