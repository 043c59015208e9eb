"""Gauges that the collector computes from the engine's statistics."""

from __future__ import annotations

import pytest

from quire.observe.metrics import EngineCollector

FULL = {"total": 100, "free": 10, "evictable": 60}
WINDOW = {"total": 40, "free": 5, "evictable": 10}


@pytest.mark.parametrize(
    ("frames", "usage"),
    [
        ({"full": FULL}, 0.3),
        ({"window": WINDOW}, 0.625),
        ({"full": FULL, "window": WINDOW}, 0.625),
        ({"state": {"total": 8, "free": 8, "evictable": 0}}, 0.0),
    ],
)
def test_the_usage_is_that_of_the_fullest_group(frames: dict[str, dict[str, int]], usage: float) -> None:
    """Evictable pages without a frame in a window do not count."""
    statistics = {"num_pages": 1000, "evictable_pages": 900, "frames": frames}
    found = {family.name: family for family in EngineCollector(lambda: statistics, lambda: True).collect()}
    (sample,) = found["quire_kv_cache_usage_ratio"].samples
    assert sample.value == pytest.approx(usage)
