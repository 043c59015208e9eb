"""Prometheus metrics of the tiers below the device, from `tiers` of the engine's statistics; none without tiers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

TIERS = ("host", "storage")
DEFECTS = ("magic", "group", "length", "layout", "key", "digest")
"""What may be wrong with a record (`quire.memory.record`)."""

COUNTERS = {
    "declined_tokens": (
        "tier_declined_tokens",
        "Prompt tokens that were cached on the host or in storage and computed again, which was faster.",
    ),
    "failed_moves": ("tier_failed_moves", "Moves between tiers that failed, or brought less than half."),
    "refused_moves": ("tier_refused_moves", "Moves that were not begun, because too much was on its way on that link."),
    "turned_off": ("tier_turned_off", "Times that a link turned itself off, trials that failed counted in."),
    "demoted_pages": ("tier_demoted_pages", "Pages that left the device and stayed on the host."),
    "lost_frames": ("tier_lost_frames", "Frames that were stored, of use, and gone from the store; stored again."),
    "host_evicted_pages": ("tier_host_evicted_pages", "Pages of which the host gave up its copy for others."),
}

Tiers = Mapping[str, Any]


def tier_metrics(tiers: Tiers, hit_tokens: int) -> Iterator[Metric]:
    """The metrics of one scrape. `hit_tokens` are those of all tiers, the device among them."""
    for key, (name, text) in COUNTERS.items():
        yield CounterMetricFamily(f"quire_{name}", text, value=float(tiers[key]))
    yield GaugeMetricFamily("quire_tier_host_bytes", "Bytes of host memory.", value=float(tiers["host_bytes"]))
    yield _hits(tiers, hit_tokens)
    yield _dropped(tiers)
    yield _corrupt(tiers["defects"])
    yield _off(tiers["off"], tiers["bandwidth"])
    yield from _store(tiers)
    yield from _links(tiers)


def _store(tiers: Tiers) -> Iterator[Metric]:
    """What the store has said, and what it has counted itself."""
    counted = tiers.get("store", {})
    failures = CounterMetricFamily(
        "quire_store_failures", "What went wrong between this process and its store, by kind.", labels=("kind",)
    )
    for kind, count in counted.get("failures", {}).items():
        failures.add_metric((kind,), float(count))
    yield failures
    records = CounterMetricFamily(
        "quire_store_records", "What became of records in a store that counts them, by this process.", labels=("state",)
    )
    for state, count in counted.items():
        if state != "failures":
            records.add_metric((state,), float(count))
    yield records
    yield _counter(
        "unanswered_records", "Records of which the store could say nothing now.", "link", tiers["store_refused"]
    )
    lost = GaugeMetricFamily(
        "quire_store_lost", "1 while the store has answered nothing for some moves in a row.", labels=("kind",)
    )
    for kind in ("read", "write"):
        lost.add_metric((kind,), float(kind in tiers["store_lost"]))
    yield lost
    yield GaugeMetricFamily(
        "quire_tier_owed_paths",
        "Cached prefixes of which something is on its way to storage or has to wait.",
        value=float(tiers["owed_paths"]),
    )


def _hits(tiers: Tiers, hit_tokens: int) -> Metric:
    below = {tier: tiers[f"{tier}_hit_tokens"] for tier in TIERS}
    return _counter(
        "hit_tokens",
        "Prompt tokens that came from the cache, by where they were; they add up to quire_hit_tokens.",
        "tier",
        {"device": hit_tokens - sum(below.values())} | below,
    )


def _dropped(tiers: Tiers) -> Metric:
    return _counter(
        "dropped_frames",
        "Frames of which no copy was made: the host had no room, or the store did not take them that time.",
        "tier",
        {"host": tiers["unsaved_frames"], "storage": tiers["unstored_frames"]},
    )


def _corrupt(defects: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(
        "quire_tier_corrupt_records",
        "Records that were not what they should be, by where they were found and what was wrong; none was served.",
        labels=("tier", "defect"),
    )
    known = [f"{tier}:{defect}" for tier in TIERS for defect in DEFECTS]
    for name in dict.fromkeys((*known, *defects)):
        tier, _, defect = name.partition(":")
        family.add_metric((tier, defect), float(defects.get(name, 0)))
    return family


def _off(off: Mapping[str, str], links: Mapping[str, Any]) -> Metric:
    """The reason is in the log and in `GET /v1/cache/statistics`."""
    family = GaugeMetricFamily(
        "quire_tier_link_off", "1 while a link has turned itself off, because to compute is quicker.", labels=("link",)
    )
    for link in links:
        family.add_metric((link,), float(link in off))
    return family


def _links(tiers: Tiers) -> Iterator[Metric]:
    links: Mapping[str, Mapping[str, Any]] = tiers["links"]
    yield _counter(
        "moved_bytes",
        "Bytes that moved between tiers, by link.",
        "link",
        {link: counters["bytes"] for link, counters in links.items()},
    )
    bandwidth = GaugeMetricFamily(
        "quire_tier_bandwidth_bytes_per_second",
        "Measured bandwidth of a link, without the time to the first byte; absent while nothing was measured.",
        labels=("link",),
    )
    for link, value in tiers["bandwidth"].items():
        if value is not None:
            bandwidth.add_metric((link,), float(value))
    yield bandwidth
    seconds = HistogramMetricFamily(
        "quire_tier_move_seconds", "Seconds of work for a move, without its wait in a queue.", labels=("link",)
    )
    for link, counters in links.items():
        buckets = [(str(bound), float(count)) for bound, count in counters["at_most"]]
        seconds.add_metric((link,), [*buckets, ("+Inf", float(counters["moves"]))], float(counters["seconds"]))
    yield seconds


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"quire_tier_{name}", text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), float(count))
    return family
