"""The counters of the backend's pools among SGLang's own metrics, which prometheus_client collects in each process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from quire.connectors.counters import BAD_RECORDS, COUNTERS, OFF, CountGrowth

_PREFIX = "sglang:quire_"
_COUNTERS = {name: Counter(_PREFIX + name, text, ["pool"]) for name, text in COUNTERS.items()}
_BAD = Counter(f"{_PREFIX}bad_records", BAD_RECORDS, ["pool", "reason"])
_OFF = Gauge(f"{_PREFIX}off", OFF, multiprocess_mode="max")


def report(pool: str, growth: CountGrowth, *, is_off: bool) -> None:
    """Bring the metrics of a pool up to date."""
    grown, bad = growth.since()
    for name, count in grown.items():
        _COUNTERS[name].labels(pool).inc(count)
    for reason, count in bad.items():
        _BAD.labels(pool, reason).inc(count)
    _OFF.set(is_off)
