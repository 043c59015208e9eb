"""A real server with tiers below the device: what it says it holds, where prompts came from, and what outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.live_server import LiveServer

PAGE = 16
WHOLE = 320  # tokens of a prompt: the pool has room for one and a half of them
REUSABLE = (WHOLE - 1) // PAGE * PAGE
TIERS = ("--host-memory", "4MiB", "--storage-size", "32MiB", "--load", "always", "--prefetch", "wait_complete")


def started(model: Path, directory: Path) -> LiveServer:
    plain = ("--model", str(model), "--dtype", "float32", "--kv-memory", "130KiB", "--eviction", "lru")
    return LiveServer.quire(*plain, *TIERS, "--storage", str(directory))


def prompt(number: int) -> list[int]:
    """One that shares nothing with those of other numbers."""
    return [number, *(1 + (number * 7 + at * 3) % 250 for at in range(WHOLE - 1))]


def ask(server: LiveServer, number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt(number), "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    status, answer = server.request("/v1/completions", body)
    assert status == 200, answer
    return dict(answer)


def from_tiers(answer: dict[str, Any]) -> dict[str, int]:
    details = answer["usage"]["prompt_tokens_details"]
    by_tier: dict[str, int] = details["cached_tokens_by_tier"]
    assert sum(by_tier.values()) == details["cached_tokens"]
    return by_tier


def by_reason(answer: dict[str, Any]) -> dict[str, int]:
    """The same, of the reasons of its explanation."""
    found = dict.fromkeys(("device", "host", "storage"), 0)
    for reason in answer["choices"][0]["explanation"]["reasons"]:
        if reason["cause"] == "hit":
            found[reason["tier"]] += reason["tokens"]
    return found


def metrics(server: LiveServer) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels, in the order of the labels' names."""
    status, text = server.request("/metrics")
    assert status == 200
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels.keys() - {"model_name"}))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores") / "pages"


@pytest.fixture(scope="module")
def tiered(tiny_model: Path, directory: Path) -> Iterator[LiveServer]:
    with started(tiny_model, directory) as live:
        yield live


def test_the_start_says_what_each_tier_holds(tiered: LiveServer, directory: Path) -> None:
    tiers = tiered.summary["tiers"]
    assert tiers["storage"]["where"] == str(directory)
    assert tiers["storage"]["bytes"] == 32 * 2**20
    assert tiers["host"]["bytes"] <= 4 * 2**20
    frames = tiers["host"]["groups"]["full"]["frames"]
    assert tiers["host"]["tokens"] == frames * PAGE > tiered.summary["tokens_that_fit"]
    assert (tiers["write_policy"], tiers["load"], tiers["prefetch"]) == ("write_through", "always", "wait_complete")
    assert any("load is 'always'" in note for note in tiers["notes"])


def test_a_prompt_says_from_which_tier_it_came(tiered: LiveServer) -> None:
    first = ask(tiered, 1)
    assert from_tiers(first) == {"device": 0, "host": 0, "storage": 0}
    assert from_tiers(ask(tiered, 1)) == {"device": REUSABLE, "host": 0, "storage": 0}
    for number in (2, 3):
        ask(tiered, number)  # more than the pool holds
    again = ask(tiered, 1, explain=True)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    found = from_tiers(again)
    assert (found["host"], found["storage"]) == (REUSABLE, 0)
    details = [(reason["cause"], reason.get("detail", "")) for reason in again["choices"][0]["explanation"]["reasons"]]
    assert details[0] == ("hit", "from host memory")
    assert by_reason(again) == found
    status, explained = tiered.request(f"/v1/cache/explain/{again['id']}")
    assert status == 200
    assert explained["explanations"][0]["hit_tokens"] == REUSABLE


def test_a_stream_says_it_too(tiered: LiveServer) -> None:
    body = {"prompt": prompt(1), "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    status, text = tiered.request("/v1/completions", body)
    assert status == 200
    assert '"cached_tokens_by_tier":{"device":' in text.replace(" ", "")


def test_metrics_are_the_statistics(tiered: LiveServer) -> None:
    for number in (1, 4, 5, 1):
        ask(tiered, number)
    tiered.wait_idle()
    shown, statistics = metrics(tiered), tiered.statistics()
    tiers = statistics["tiers"]
    hits = {tier: shown["quire_tier_hit_tokens_total", tier] for tier in ("device", "host", "storage")}
    assert hits["host"] == tiers["host_hit_tokens"] > 0
    assert hits["storage"] == tiers["storage_hit_tokens"] == 0
    assert sum(hits.values()) == statistics["hit_tokens"] == shown["quire_hit_tokens_total",]
    for link in ("save", "load", "archive"):
        assert shown["quire_tier_moved_bytes_total", link] == tiers["links"][link]["bytes"] > 0
        assert shown["quire_tier_move_seconds_count", link] == tiers["links"][link]["moves"] > 0
    assert tiers["links"]["load"]["bytes"] == tiers["loaded_bytes"]
    assert shown["quire_tier_bandwidth_bytes_per_second", "load"] > 0
    assert shown["quire_tier_compute_tokens_per_second",] == tiers["compute_rate"] > 0
    for state in ("free", "cached", "moving", "quarantined"):
        assert shown["quire_frames", "full", state, "host"] == tiers["host"]["full"][state]
    assert not [name for name, value in shown.items() if name[0] == "quire_tier_link_off" and value]
    assert not [name for name, value in shown.items() if name[0] == "quire_tier_corrupt_records_total" and value]
    assert shown["quire_tier_demoted_pages_total",] == tiers["demoted_pages"] > 0


def test_what_was_cached_outlives_the_server(tiered: LiveServer, tiny_model: Path, directory: Path) -> None:
    """Stopped right after an answer: what was on its way arrives. That a killed one leaves what had arrived, the demo
    shows and checks."""
    answers = {number: ask(tiered, number) for number in (6, 7)}
    tiered.terminate()
    assert tiered.wait() == 0, tiered.log()
    assert not tiered.children_left()
    with started(tiny_model, directory) as second:
        for number, before in answers.items():
            after = ask(second, number, explain=True)
            assert from_tiers(after) == {"device": 0, "host": 0, "storage": REUSABLE}
            assert after["choices"][0]["text"] == before["choices"][0]["text"]
            assert after["choices"][0]["explanation"]["reasons"][0]["detail"] == "from storage"
            assert by_reason(after) == from_tiers(after)
        assert from_tiers(ask(second, 6, cache_salt="mine"))["storage"] == 0
        shown = metrics(second)
        assert shown["quire_tier_hit_tokens_total", "storage"] == 2 * REUSABLE
        assert shown["quire_tier_moved_bytes_total", "fetch"] > 0


def test_usage_without_tiers_is_as_it_was(server: LiveServer) -> None:
    status, answer = server.request("/v1/completions", {"prompt": [5] * 40, "max_tokens": 1})
    assert status == 200
    assert list(answer["usage"]["prompt_tokens_details"]) == ["cached_tokens"]
    assert server.summary["tiers"] is None
