"""How many engines a load needs, by what they report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.fleet.scaling import IN_FLIGHT, wanted_replicas


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        ({IN_FLIGHT: {"a": 4.0, "b": 4.5}}, 3),
        ({IN_FLIGHT: {"a": 8.0}}, 2),
        ({IN_FLIGHT: {"a": 0.0, "b": 0.0}}, 0),  # Serve keeps the fewest that there may be
        ({IN_FLIGHT: {}}, 5),
        ({}, 5),
        (None, 5),
    ],
)
def test_engines_have_the_target_of_requests_each(reported: Any, wanted: int) -> None:
    config = SimpleNamespace(target_ongoing_requests=4.0)
    context: Any = SimpleNamespace(aggregated_metrics=reported, target_num_replicas=5, config=config)
    assert wanted_replicas(context) == (wanted, {})
