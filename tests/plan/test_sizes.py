"""Another size of the same plan: the pools of an engine that was started with it."""

from __future__ import annotations

import pytest

from quire.errors import PlanError
from quire.plan.plan import size_within
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.spec.catalogue import CATALOGUE
from quire.spec.model import ModelSpec

GIB = 2**30
MODELS = [name for name in ("llama-3.1-8b", "gemma-3-27b", "qwen3.5-27b", "deepseek-v3.2") if name in CATALOGUE]


def spec_of(name: str) -> ModelSpec:
    return ModelSpec.from_config(CATALOGUE[name].config)


@pytest.mark.parametrize("name", MODELS)
def test_a_size_is_the_plan_of_so_many_bytes(name: str) -> None:
    """Or one with less unused: a plan is solved before its frames are rounded down to whole ones."""
    spec, settings = spec_of(name), PlanSettings(max_model_len=8192)
    whole = make_plan(spec, settings.changed(kv_memory=64 * GIB))
    for size in (9 * GIB, 20 * GIB + 12_345, 40 * GIB):
        found, alone = size_within(whole, size), make_plan(spec, settings.changed(kv_memory=size)).split
        largest = max(group.layout.bytes_per_frame for group in found.groups)
        assert alone.pool_bytes <= found.pool_bytes <= size < found.pool_bytes + 2 * largest
        assert all(n >= least for n, least in zip(found.frames, alone.frames, strict=True))
    assert size_within(whole, 64 * GIB) == size_within(whole, 65 * GIB) == whole.memory


def test_too_few_bytes_say_what_the_pools_need() -> None:
    whole = make_plan(spec_of(MODELS[0]), PlanSettings(kv_memory=8 * GIB, max_model_len=8192))
    with pytest.raises(PlanError, match="the smallest pools take") as caught:
        size_within(whole, 2**20)
    least = int(caught.value.fix.removeprefix("give at least ").split()[0])
    assert size_within(whole, least * 2**10).num_pages == 1


def test_a_plan_says_what_the_least_of_a_range_holds() -> None:
    settings = PlanSettings.read({"kv_memory": "2GiB..8GiB", "max_model_len": 8192})
    plan = make_plan(spec_of(MODELS[0]), settings)
    small = size_within(plan, 2 * GIB)
    [note] = [note for note in plan.notes if "may be made smaller" in note]
    assert f"2.00 GiB hold {small.num_tokens:,} tokens" in note
