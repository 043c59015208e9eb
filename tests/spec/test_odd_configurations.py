"""Configurations with values that make no sense: refused or planned, and never a crash, a hang or a negative."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from quire.errors import InvalidInput, PlanError, UnsupportedModel
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.spec.catalogue import CATALOGUE
from quire.spec.config_reader import ConfigReader
from quire.spec.model import ModelSpec
from quire.spec.weights import read_weights
from tests.changes import SPECS, unless_changed
from tests.covering import each_of, few

pytestmark = unless_changed(__name__, *SPECS)

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 10**30, 0.5, 128.0, math.nan, math.inf, -math.inf, "", "128", "abc", [], [1], {},
    {"a": 1}, [[]], [None] * 3, {"num_bits": "x"}, "full_attention",
)  # fmt: skip


def check(config: Any) -> None:
    try:
        spec = ModelSpec.from_config(config)
        plan = make_plan(spec, PlanSettings(kv_memory=2**40))
    except (UnsupportedModel, InvalidInput, PlanError):
        pass
    else:
        assert plan.config.max_total_num_tokens > 0 and plan.bytes_per_token >= 0
        assert all(line.bytes >= 0 for line in plan.ledger)
    try:
        weights = read_weights(ConfigReader(config))
    except UnsupportedModel:
        return
    assert weights.num_parameters >= 0 and weights.bytes_on_rank(1) >= 0


@pytest.mark.parametrize("name", few([*CATALOGUE][::2] + [*CATALOGUE][1::2], 55))
def test_odd_values_in_any_field(name: str) -> None:
    """Some fields of every model, each with some odd value; another choice for every model."""
    config, rng = dict(CATALOGUE[name].config), random.Random(name)
    for field in rng.sample(sorted(config), k=min(8, len(config))):
        for odd in rng.sample(ODD, k=4):
            check({**config, field: odd})


@each_of("odd", [*ODD, [], "text"])
def test_what_is_no_configuration(odd: Any) -> None:
    with pytest.raises(UnsupportedModel):
        ModelSpec.from_config(odd)


@pytest.mark.parametrize("field", ["quantization_config", "compression_config", "architectures", "vision_config"])
def test_odd_values_beside_the_sizes(field: str) -> None:
    for odd in ODD:
        check({**CATALOGUE["qwen3-8b"].config, field: odd})
