"""The metrics of the tiers are the engine's numbers, each of them once, and absent where there are no tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from quire.cache.statistics import CacheStatistics, FrameCounts
from quire.counters import Section, declared_in, statistics_of
from quire.engine.tier_report import StoreCounters
from quire.engine.tiers import LinkStates
from quire.observe.metrics import ServerMetrics
from quire.offload.host_groups import HostFrameCounts
from quire.offload.tier_settings import TierCounters
from quire.offload.tiering import TierGauges
from quire.tiers.transfer import LANES, Lane, Transfer


def counted() -> TierCounters:
    counters = TierCounters(
        unsaved_frames=3, unstored_frames=5, host_hit_tokens=32, storage_hit_tokens=64, declined_tokens=16
    )
    counters.failed_moves, counters.refused_moves, counters.demoted_pages = 7, 9, 11
    counters.corrupt("host", ["digest", "digest"])
    counters.corrupt("storage", ["key"])
    for seconds, num_bytes in ((0.0002, 1000), (0.5, 5000), (20.0, 0)):
        move = Transfer(Lane.FETCH, ())
        move.seconds, move.moved_bytes = seconds, num_bytes
        counters.links[move.lane.name].add(move)
    return counters


STORE = StoreCounters(failures={"ConnectionError": 4}, hits=9, evicted=6, lost=1, overtaken=2)
FRAMES = FrameCounts(total=5, free=2, private=1, cached=2)


def sections(store: StoreCounters = STORE, lost: tuple[str, ...] = ("read",), **links: Any) -> list[Section]:
    host = {"full": HostFrameCounts(total=10, free=4, cached=3, moving=2, quarantined=1)}
    refused = {"look": 5, "fetch": 0, "archive": 3}
    names = [link.name for link in LANES if link is not Lane.DELETE]
    tiers = counted()
    states = {
        "resolved": {},
        "device_hit_tokens": 200 - tiers.num_hits,
        "host_bytes": 4096,
        "bandwidth": dict.fromkeys(names) | {"fetch": 2.5e8},
        "latency": dict.fromkeys(names),
        "stuck": {},
        **links,
    }
    return [
        ("", CacheStatistics(hit_tokens=200, frames={"full": FRAMES})),
        ("tiers", tiers),
        ("tiers", TierGauges(host=host, pending_paths=2, store_lost=list(lost), store_refused=refused)),
        ("tiers", LinkStates(store=store, **states)),
    ]


def samples(found: Sequence[Section]) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels, in the order of the labels' names."""
    declared, counted = declared_in(found), statistics_of(found)
    text = ServerMetrics(declared, lambda: counted, lambda: True, model_name="m", version="1").text().decode()
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels.keys() - {"model_name"}))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_number_is_there() -> None:
    shown = samples(sections(off={"load": "recompute is cheaper below 9.1 GB/s"}, turned_off=2))
    hits = {tier: shown["quire_tier_hit_tokens_total", tier] for tier in ("device", "host", "storage")}
    assert hits == {"device": 104, "host": 32, "storage": 64}
    assert shown["quire_tier_dropped_frames_total", "host"] == 3
    assert shown["quire_tier_dropped_frames_total", "storage"] == 5
    assert shown["quire_tier_declined_tokens_total",] == 16
    assert shown["quire_tier_failed_moves_total",] == 7
    assert shown["quire_tier_refused_moves_total",] == 9
    assert shown["quire_tier_demoted_pages_total",] == 11
    assert shown["quire_tier_turned_off_total",] == 2
    assert shown["quire_tier_host_bytes",] == 4096
    assert shown["quire_tier_corrupt_records_total", "digest", "host"] == 2
    assert shown["quire_tier_corrupt_records_total", "key", "storage"] == 1
    assert shown["quire_tier_corrupt_records_total", "digest", "storage"] == 0
    assert (shown["quire_tier_link_off", "load"], shown["quire_tier_link_off", "fetch"]) == (1, 0)


def test_what_a_store_has_counted_is_there() -> None:
    shown = samples(sections())
    assert shown["quire_store_failures_total", "ConnectionError"] == 4
    records = {state: shown["quire_store_records_total", state] for state in ("hits", "evicted", "lost", "overtaken")}
    assert records == {"hits": 9, "evicted": 6, "lost": 1, "overtaken": 2}
    assert shown["quire_tier_unanswered_records_total", "look"] == 5
    assert (shown["quire_store_lost", "read"], shown["quire_store_lost", "write"]) == (1, 0)
    assert shown["quire_tier_pending_paths",] == 2
    bare = samples(sections(store=StoreCounters(), lost=()))
    assert not [name for name in bare if name[0] in ("quire_store_failures_total", "quire_store_records_total")]


def test_a_link_has_bytes_bandwidth_and_a_histogram() -> None:
    shown = samples(sections())
    assert shown["quire_tier_moved_bytes_total", "fetch"] == 6000
    assert shown["quire_tier_bandwidth_bytes_per_second", "fetch"] == 2.5e8
    assert ("quire_tier_bandwidth_bytes_per_second", "save") not in shown
    buckets = {
        key[1]: value
        for key, value in shown.items()
        if (key[0], key[-1]) == ("quire_tier_move_seconds_bucket", "fetch")
    }
    assert buckets == {"0.0001": 0, "0.001": 1, "0.01": 1, "0.1": 1, "1.0": 2, "10.0": 2, "+Inf": 3}
    assert shown["quire_tier_move_seconds_count", "fetch"] == 3
    assert shown["quire_tier_move_seconds_sum", "fetch"] == 20.5002
    assert shown["quire_tier_move_seconds_count", "load"] == 0


def test_frames_of_a_tier_add_up_to_its_pool() -> None:
    shown, found = samples(sections()), statistics_of(sections())
    for tier, frames in (("device", found["frames"]["full"]), ("host", found["tiers"]["host"]["full"])):
        counts = {key[2]: value for key, value in shown.items() if (key[0], key[-1]) == ("quire_frames", tier)}
        assert sum(counts.values()) == frames["total"]
        states = [
            state for state in ("free", "private", "cached", "moving", "quarantined", "released") if state in frames
        ]
        assert counts == {state: frames[state] for state in states} and len(states) >= 4


def test_without_tiers_there_are_none() -> None:
    shown = samples(sections()[:1])
    assert not [name for name in shown if "tier" in name[0]]
    assert {key[3] for key in shown if key[0] == "quire_frames"} == {"device"}
