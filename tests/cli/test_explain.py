"""`quire explain`: of a trace, of a live server, for people and for machines, and how it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quire.cli.explain import _sum_of, forecast_remark, merged_evictions, reasons_table
from quire.cli.report import drafts_remark
from tests.changes import SIMULATOR, slow_unless_changed
from tests.cli.conftest import Run
from tests.serve.live_server import LiveServer

TRACE = ("sessions", "--limit", 60, "--policy", "lru")
SHORT = ("sessions", "--limit", 30, "--policy", "lru")


def answer(run: Run, *arguments: object) -> dict[str, Any]:
    done = run("explain", *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def add_up(explanation: dict[str, Any]) -> bool:
    tokens = sum(reason["tokens"] for reason in explanation["reasons"])
    hit = sum(reason["tokens"] for reason in explanation["reasons"] if reason["cause"] == "hit")
    return tokens == explanation["prompt_tokens"] and hit == explanation["hit_tokens"]


def test_a_trace_in_sum_and_its_most_evicted_request(run: Run) -> None:
    summary = answer(run, *SHORT)
    assert sum(summary["tokens_by_cause"].values()) == summary["prompt_tokens"]
    assert summary["tokens_by_cause"]["hit"] == summary["hit_tokens"]
    worst = summary["most_lost"][0]
    assert worst["lost_tokens"] == max(entry["lost_tokens"] for entry in summary["most_lost"]) > 0
    found = answer(run, "sessions", worst["request_id"], *SHORT[1:])
    assert add_up(found)
    evicted = [reason for reason in found["reasons"] if reason["cause"] == "evicted"]
    assert sum(reason["tokens"] for reason in evicted) == worst["lost_by_cause"]["evicted"]
    names = [reason["by"].partition(" and ")[0] for reason in evicted]
    culprits = {name: answer(run, "sessions", name, *SHORT[1:]) for name in set(names)}
    for name, reason in zip(names, evicted, strict=True):
        assert culprits[name]["arrived"] <= found["admitted"] - reason["seconds_ago"]


def test_tables_fit_a_terminal(run: Run) -> None:
    summary = run("explain", *TRACE, env={"COLUMNS": "80"})
    assert summary.exit_code == 0, summary.stderr
    for word in ("workload sessions", "all prompt tokens", "what had been cached", "namespace"):
        assert word in summary.stdout
    name = summary.stdout.splitlines()[-1].split()[0]
    one = run("explain", "sessions", name, *TRACE[1:], env={"COLUMNS": "80"})
    assert one.exit_code == 0, one.stderr
    rows = [line.split() for line in one.stdout.splitlines() if line.strip() and line.split()[0].isdigit()]
    assert rows[0][0] == "0"
    for word in ("s ago for s", "is the first that was never", f"{name}: "):
        assert word in one.stdout
    assert max(map(len, (summary.stdout + one.stdout).splitlines())) <= 80


@slow_unless_changed(*SIMULATOR, "src/quire/cli/", "src/quire/observe/")
@pytest.mark.parametrize("model", ["gemma-3-1b", "qwen3-next-80b-a3b"])
def test_models_with_several_groups(run: Run, model: str) -> None:
    asked = (*TRACE, "--model", model, "--pool-tokens", "1/4")
    summary = answer(run, *asked)
    causes = summary["tokens_by_cause"]
    assert sum(causes.values()) == summary["prompt_tokens"] > 0
    assert sum(summary["tokens_by_group_detail"].values()) == causes["group"]
    assert all("group '" in detail for detail in summary["tokens_by_group_detail"])
    for entry in summary["most_lost"]:
        assert (
            entry["lost_tokens"] == sum(entry["lost_by_cause"].values()) <= entry["prompt_tokens"] - entry["hit_tokens"]
        )


@slow_unless_changed(*SIMULATOR, "src/quire/cli/", "src/quire/observe/")
def test_what_was_lost_to_namespaces_and_groups_is_listed(run: Run) -> None:
    same = run("explain", "same-text-other-namespace", "--limit", 40, env={"COLUMNS": "80"})
    assert "namespace" in next(line for line in same.stdout.splitlines() if line.startswith("request "))
    asked = ("sessions", "--limit", 60, "--model", "qwen3-next-80b-a3b", "--pool-tokens", "1/4")
    assert answer(run, *asked)["tokens_by_cause"]["group"] > 0
    shown = run("explain", *asked, env={"COLUMNS": "80"}).stdout
    assert "group 'state' has dropped what it needs" in shown.replace("\n", " ")
    assert " group" in next(line for line in shown.splitlines() if line.startswith("request "))


def test_refused_requests_stand_beside_the_causes(run: Run) -> None:
    found = answer(run, "near-capacity", "--pool-tokens", "4k")
    assert sum(found["tokens_by_cause"].values()) + found["refused_tokens"] == found["prompt_tokens"] == 40_640
    assert found["refused_tokens"] > 0
    assert "can never hold" in run("explain", "near-capacity", "--pool-tokens", "4k").stdout


def evictions(*rows: tuple[int, str, float]) -> list[dict[str, Any]]:
    at, found = 0, []
    for tokens, by, ago in rows:
        detail = f"evicted {ago:.1f} s ago for {by}"
        found.append(
            {"cause": "evicted", "start": at, "tokens": tokens, "by": by, "seconds_ago": ago, "detail": detail}
        )
        at += tokens
    return found


def test_neighbouring_evictions_share_a_row() -> None:
    few = evictions((16, "a", 0.2), (32, "a", 1.0), (16, "b", 1.0), (16, "a", 1.1))
    rows = merged_evictions(few)
    assert [(row["tokens"], row["detail"]) for row in rows] == [
        (48, "evicted 0.2 to 1.0 s ago for a"),
        (16, "evicted 1.0 s ago for b"),
        (16, "evicted 1.1 s ago for a"),
    ]
    many = evictions(*((16 if at < 6 else 160, f"s{at}", at / 10) for at in range(13)))
    hit, new = {"cause": "hit", "start": 0, "tokens": 16}, {"cause": "new", "start": 9000, "tokens": 1}
    rows = merged_evictions([hit, *many, new])
    assert (rows[0], rows[-1], len(rows)) == (hit, new, 10)
    assert sum(row["tokens"] for row in rows) == sum(row["tokens"] for row in many) + 17
    assert any(row["detail"] == "evicted 0.0 to 0.5 s ago for s0, s1 and 4 more" for row in rows[1:-1])


def test_a_page_between_keeps_evictions_apart() -> None:
    rows = [{"cause": "hit", "start": at} if at % 2 else evictions((16, f"s{at}", 1.0))[0] for at in range(20)]
    assert merged_evictions(rows) == rows


def test_what_the_policy_expects_is_said_once_of_neighbours() -> None:
    own = {"kind": "turn 2, quick, ended: tool", "chance": 0.9, "expected_s": 12.4}
    other = own | {"kind": "turn 1, short, ended: answer"}
    places = [own | {"by": "a"}, own | {"by": "b"}, other | {"by": "c"}, {"by": "d"}]
    reasons = [
        {"cause": "evicted", "start": 16 * at, "tokens": 16, "detail": "evicted", "seconds_ago": 1.0} | each
        for at, each in enumerate(places)
    ]
    console = Console(width=200, record=True, file=StringIO())
    console.print(reasons_table({"reasons": reasons}))
    shown = console.export_text()
    told = "turn 2, quick, ended: tool: 90% come again, half of them within 12 s"
    assert shown.count(told) == 1 and shown.count("ended: answer: 90%") == 1
    assert forecast_remark({"cause": "new"}) == ""


BAD = [
    ((), "nothing to explain"),
    (("nothing-like-it",), "no trace file or workload"),
    (("chatcmpl-0123",), "is the id of a server's response"),
    (("chat", "c.1", "--limit", "3"), "no request 'c.1'"),
    (("chat", "--limit", "3", "--policy", "lru,lfu"), "these are 2 replays"),
    (("near-capacity", "fits-never", "--pool-tokens", "4k"), "no request 'fits-never'"),
    (("x", "y", "--url", "http://127.0.0.1:9"), "has no traces"),
    (("x", "--url", "http://127.0.0.1:9", "--policy", "lru", "--seed", "0"), "--policy, --seed: for replays"),
    (("x", "--url", "127.0.0.1:9"), "not a server's address"),
    (("x", "--url", "http://[::1"), "not a server's address"),
    (("x", "--url", "http://127.0.0.1:9"), "does not answer"),
]


@pytest.mark.parametrize(("arguments", "text"), BAD)
def test_bad_input_says_what_and_how(run: Run, arguments: tuple[str, ...], text: str) -> None:
    done = run("explain", *arguments, "--json")
    assert done.exit_code == 2, done.stdout
    error = json.loads(done.stderr)["error"]
    assert text in error["message"]
    assert error["fix"]


def test_who_was_never_admitted_says_why(run: Run) -> None:
    done = [run("explain", "near-capacity", index, "--pool-tokens", "4k", "--json") for index in range(10)]
    refused = [json.loads(each.stderr)["error"] for each in done if each.exit_code == 2]
    assert len(refused) == 4
    assert all("never admitted: 4,080 prompt" in error["message"] for error in refused[:1])


def test_a_governor_says_why_drafts_are_off() -> None:
    found = {"accepted_tokens": 1200, "draft_tokens": 6000, "tokens_per_step": 1.25}
    brought = "1,200 of 6,000 drafts accepted, 1.25 tokens of a request in a step"
    assert drafts_remark(found) == drafts_remark({**found, "is_off": 0.0}) == brought
    off = drafts_remark({**found, "is_off": 1.0, "draft_cost": 0.42, "draft_brings": 0.2})
    assert off == f"{brought}; off now, because a draft costs 0.42 tokens and brings 0.20"
    off = drafts_remark({**found, "is_off": 1.0, "draft_cost": 0.2, "draft_brings": 0.42})
    assert off == f"{brought}; off now: so far drafts lost time (a draft costs 0.20 tokens and brings 0.42)"


def test_engines_of_a_router_are_reported_together() -> None:
    parts = [
        {"prompt_tokens": 10, "hit_tokens": 4, "explained_tokens": {"hit": 4, "new": 6}},
        {"prompt_tokens": 5, "hit_tokens": 0, "explained_tokens": {"new": 5, "peer": 0}},
    ]
    causes = {"hit": 4, "new": 11, "peer": 0}
    assert _sum_of(parts) == {"prompt_tokens": 15, "hit_tokens": 4, "explained_tokens": causes}


# -- a live server


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[LiveServer]:
    ngram = '{"method": "ngram", "num_speculative_tokens": 2}'
    settings = ("--kv-memory", "100KiB", "--api-key", "secret", "--speculative-config", ngram)
    with LiveServer.quire("--model", str(tiny_model), *settings) as live:
        yield live


def test_a_live_server(run: Run, server: LiveServer) -> None:
    key = {"Authorization": "Bearer secret"}
    body = {"prompt": "A long prompt that comes twice to the same server.", "max_tokens": 2, "n": 2}
    (_, first), (status, again) = (server.request("/v1/completions", body, headers=key) for _ in range(2))
    assert status == 200, again
    asked = ("--url", f"{server.summary['url']}/v1", "--api-key", "secret")
    found = answer(run, *asked, again["id"])
    assert [one["sequence"] for one in found["explanations"]] == [f"{again['id']}-0-{index}" for index in (0, 1)]
    assert all(map(add_up, found["explanations"]))
    assert found["explanations"][0]["hit_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    one = answer(run, *asked, f"{first['id']}-0-0")
    assert [reason["cause"] for reason in one["explanations"][0]["reasons"]] == ["new"]
    summary = answer(run, *asked)
    assert sum(summary["tokens_by_cause"].values()) == summary["prompt_tokens"]
    shown = run("explain", *asked, again["id"], env={"COLUMNS": "80"}).stdout
    assert f"{again['id']}-0-1" in shown and "48 of them reused" in shown.replace("\n", " ")
    told = " ".join(run("explain", *asked).stdout.split())
    assert "all prompt tokens" in told
    drafts = summary["speculation"]
    assert f"Speculation: {drafts['accepted_tokens']} of {drafts['draft_tokens']} drafts accepted, 1." in told
    unknown = run("explain", *asked, "unknown", "--json")
    assert unknown.exit_code == 2
    error = json.loads(unknown.stderr)["error"]
    assert error["code"] == "QUIRE-REQUEST-01" and "1,000" in error["message"]
    wrong = run("explain", *asked[:2], "--api-key", "guess", "unknown", "--json")
    assert json.loads(wrong.stderr)["error"]["code"] == "QUIRE-AUTH-01"
