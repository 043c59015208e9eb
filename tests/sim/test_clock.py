"""Costs of steps: from a device, from numbers, and fitted to measurements."""

from __future__ import annotations

import numpy as np
import pytest

from quire.plan.devices import DEVICES
from quire.plan.step_cost import CostFit, CostModel
from quire.sim.clock import VirtualClock
from quire.spec.catalogue import catalogue_model
from quire.spec.model import ModelSpec


def lengths(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_a_step_is_priced_by_what_it_computes_and_reads() -> None:
    cost = CostModel(launch=1.0, weights=5.0, token=1.0, pair=0.1, reads=((0.01, 0), (1.0, 8)))
    # One prompt of tokens 2..5, which read 3 + 4 + 5 + 6 keys, and a single token that reads 101, and 8 of a window.
    step = (lengths(2, 100), lengths(6, 101))
    assert cost.seconds(*step) == pytest.approx(max(5.0, 5 * 1.0) + 18 * 0.1 + 101 * 0.01 + 8 * 1.0)
    assert cost.seconds(lengths(0), lengths(1)) == pytest.approx(5.0 + 0.01 + 1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_that_can_be_planned_has_costs(device: str) -> None:
    known = catalogue_model("llama-3.1-8b")
    assert known is not None
    spec = ModelSpec.from_config(known.config)
    one, two = (
        CostModel.from_device(
            device, spec, spec.groups(16), weight_bytes=16 * 10**9, active_parameters=8 * 10**9, ranks=ranks
        )
        for ranks in (1, 2)
    )
    prompt, decode = (lengths(0), lengths(2048)), (lengths(2048), lengths(2049))
    assert 0.001 < one.seconds(*decode) < one.seconds(*prompt) < 2
    assert two.seconds(*prompt) == pytest.approx(one.seconds(*prompt) / 2)


def test_a_fit_finds_the_costs_that_steps_were_made_of() -> None:
    random = np.random.default_rng(0)
    made = CostModel(launch=0.002, weights=0.0, token=1e-4, pair=2e-8, reads=((3e-7, 0),))
    fit, falling = CostFit(), CostFit()
    for _ in range(60):
        starts = random.integers(0, 2000, size=8)
        ends = starts + np.where(random.random(8) < 0.7, 1, random.integers(2, 500, size=8))
        fit.add(starts, ends, made.launch + made.seconds(starts, ends))
        falling.add(starts, ends, 0.01 / (1 + int((ends - starts).sum())))
    found, other = fit.model(), falling.model()
    assert found is not None and other is not None
    assert (found.launch, found.token, found.pair) == pytest.approx((made.launch, made.token, made.pair))
    assert found.reads[0][0] == pytest.approx(3e-7)
    assert other.token == 0.0  # a cost that would be below zero is none


def test_overlapping_steps_wait_for_the_device_and_not_for_launches() -> None:
    clock = VirtualClock(CostModel(launch=1.0, weights=10.0, token=0.0, pair=0.0, reads=()))
    one = (lengths(0), lengths(1))
    assert clock.launch(*one) == 11.0
    assert clock.launch(*one) == 21.0  # launched while the first runs
    clock.move_to(21.0)
    clock.move_to(5.0)
    assert clock.launch(*one) == 32.0
