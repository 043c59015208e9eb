"""A counter that is declared once is in the statistics and among the metrics."""

from __future__ import annotations

import pytest

from quire.cache.statistics import CacheStatistics, FrameCounts, usage_of
from quire.counters import declared_in, plain
from quire.observe.metrics import ServerMetrics

FULL = FrameCounts(total=100, free=10, evictable=60)
WINDOW = FrameCounts(total=40, free=5, evictable=10)


@pytest.mark.parametrize(
    ("frames", "usage"),
    [
        ({"full": FULL}, 0.3),
        ({"window": WINDOW}, 0.625),
        ({"full": FULL, "window": WINDOW}, 0.625),
        ({"state": FrameCounts(total=8, free=8)}, 0.0),
    ],
)
def test_the_usage_is_that_of_the_fullest_group(frames: dict[str, FrameCounts], usage: float) -> None:
    """Evictable pages without a frame in a window do not count."""
    statistics = CacheStatistics(num_pages=1000, evictable_pages=900, frames=frames, usage=usage_of(frames))
    declared, counted = declared_in([("", statistics)]), plain(statistics)
    server = ServerMetrics(declared, lambda: counted, lambda: True, model_name="m", version="1")
    found = {family.name: family for family in server.collect()}
    (sample,) = found["quire_kv_cache_usage_ratio"].samples
    assert sample.value == pytest.approx(usage)
