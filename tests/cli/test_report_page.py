"""Reports as pages: one file that loads nothing, in which no text is markup, with the numbers of the JSON."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from quire.cli.report import Report, plain_table
from quire.cli.report_page import page_of
from tests.cli.conftest import Run
from tests.serve.live_server import LiveServer

HOSTILE = "</script><!--<script><img src=x onerror=alert(1)>'\"&"
SHORT = ("chat", "--limit", 8, "--seed", 3)


def scripts(page: str) -> list[str]:
    return re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", page, re.DOTALL)


def parts_of(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script id="report" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    parts: list[dict[str, Any]] = json.loads(found[1])["parts"]
    return parts


def written(run: Run, path: Path, *arguments: object) -> tuple[list[dict[str, Any]], Any]:
    """The parts of the page that a command writes, and its JSON."""
    done = run(*arguments, "--json", "--html", path / "page.html")
    assert done.exit_code == 0, done.stderr
    return parts_of((path / "page.html").read_text()), json.loads(done.stdout)


def of_kind(parts: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [part for part in parts if part["kind"] == kind]


def test_texts_are_in_the_page_as_they_are_and_never_markup() -> None:
    shown = [Panel(Group(plain_table((HOSTILE,), [(Text(HOSTILE),)], title="[bold]t[/bold]"), HOSTILE), title="h")]
    page = page_of(Report(None, lambda: shown), HOSTILE)
    assert page.count("<script") == page.count("</script>") == 3 and "<img" not in page and "<!--" not in page
    heading, table, text = parts_of(page)
    assert (heading["text"], table["heads"], table["rows"], text["text"]) == ("h", [HOSTILE], [[HOSTILE]], HOSTILE)


def test_the_page_allows_its_own_scripts_alone_and_loads_nothing() -> None:
    page = page_of(Report(None, lambda: ["text"]), "title")
    found = scripts(page)
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)
    assert policy is not None and policy[1].startswith("default-src 'none'") and len(found) == 2
    hashes = {b64encode(sha256(text.encode()).digest()).decode() for text in found}
    assert set(re.findall(r"'sha256-(.*?)'", policy[1])) == hashes
    own = page.replace(found[0], "")  # uPlot's licence names its address
    assert not re.search(r"https?:|\bsrc=|<link|@import|^import |^export |url\(", own, re.MULTILINE)


@pytest.mark.parametrize("more", [("--prefill", 1, "--decode", 2), ("--replicas", 2, "--router", "prefix,events")])
def test_engines_beside_each_other_have_bars(run: Run, tmp_path: Path, more: tuple[object, ...]) -> None:
    parts, results = written(run, tmp_path, "replay", "chat", "--limit", 20, *more)
    bars = of_kind(parts, "bar")
    assert len(bars) == (2 if "--prefill" in more else 4) and len(results) == 2
    for shown, each in zip(bars, results, strict=False):
        hit, received, computed = (part["value"] for part in shown["parts"])
        assert hit == each["hit_tokens"] and received == each.get("received_tokens", 0)
        assert hit + received + computed == each["prompt_tokens"] > hit
    assert "--prefill" in more or [part["value"] for part in bars[2]["parts"]] == [
        engine["prompt_tokens"] for engine in results[0]["engines"]
    ]


def test_a_sweep_has_the_rates_of_its_runs(run: Run, tmp_path: Path) -> None:
    parts, runs = written(run, tmp_path, "replay", *SHORT, "--policy", "lru,lfu", "--pool-tokens", "4k,1/2,16k")
    sweep, *pools = of_kind(parts, "chart")
    assert sweep["x"] == sorted({each["pool_tokens"] for each in runs}) and len(pools) == len(runs) == 6
    shown = {series["name"]: series["values"] for series in sweep["series"]}
    assert list(shown) == ["lru", "lfu", "optimum", "ideal"]
    for each in runs:
        at = sweep["x"].index(each["pool_tokens"])
        assert shown[each["policy"]][at] == round(100 * each["hit_rate"], 2)
        assert shown["optimum"][at] == round(100 * each["optimal_hit_rate"], 2) >= shown[each["policy"]][at]
    for each, pool in zip(runs, pools, strict=True):
        assert len(pool["x"]) == len(each["occupancy"]) > 5 and max(pool["series"][0]["values"]) <= 100
    assert [part for part in of_kind(parts, "table") if ["optimum", *[""] * 9] < part["rows"][-2]]


def test_the_pool_is_shown_beside_its_size(run: Run, tmp_path: Path) -> None:
    parts, (found,) = written(
        run, tmp_path, "replay", *SHORT, "--policy", "lru", "--pool-tokens", "8k", "--resizes", "3s:1/2"
    )
    (pool,) = of_kind(parts, "chart")
    assert pool["series"][-1]["name"] == "its size"
    assert pool["series"][-1]["values"] == [round(100 * size, 2) for _, size in found["sizes"]]


def test_one_pool_has_a_bar_of_all_prompt_tokens(run: Run, tmp_path: Path) -> None:
    parts, runs = written(run, tmp_path, "replay", "sessions", "--limit", 40)
    bars = of_kind(parts, "bar")
    assert len(bars) == len(runs) == 2 and parts[0]["kind"] == "text"
    for each, found in zip(runs, bars, strict=True):
        by_name = {part["name"]: part["value"] for part in found["parts"]}
        assert sum(by_name.values()) == each["prompt_tokens"] and min(by_name.values()) >= 0
        assert by_name["hit"] == each["hit_tokens"] > 0


def test_a_plan_has_its_ledger(run: Run, tmp_path: Path) -> None:
    parts, found = written(run, tmp_path, "plan", "llama-3.1-8b", "--gpu", "h100-80gb")
    assert of_kind(parts, "ledger")[0]["lines"] == found["ledger"]
    assert of_kind(parts, "heading")[0]["text"].endswith("fits")
    parts, found = written(run, tmp_path, "plan", "llama-3.1-8b", "--gpu", "h100-80gb", "--sweep", "context")
    tokens, at_once = of_kind(parts, "chart")
    assert tokens["series"][0]["values"] == [row["tokens"] for row in found["rows"]]
    assert at_once["series"][0]["values"] == [row["requests at once"] for row in found["rows"]]


def test_explanations_have_the_tokens_of_each_cause(run: Run, tmp_path: Path) -> None:
    parts, found = written(run, tmp_path, "explain", "sessions", "--limit", 60)
    assert of_kind(parts, "causes")[0]["causes"] == found["tokens_by_cause"]
    name = found["most_lost"][0]["request_id"]
    parts, found = written(run, tmp_path, "explain", "sessions", name, "--limit", 60)
    strip = of_kind(parts, "strip")[0]
    assert strip["page_size"] == 16
    assert sum(each["tokens"] for each in strip["reasons"]) == strip["prompt_tokens"] == found["prompt_tokens"]


def test_explanations_of_a_server_have_its_prompts(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    with LiveServer.quire("--model", str(tiny_model), "--kv-memory", "100KiB") as live:
        for _ in range(2):
            status, answer = live.request("/v1/completions", {"prompt": "abcdefghij" * 8, "max_tokens": 2})
            assert status == 200
        where = ("explain", "--url", live.summary["url"])
        parts, found = written(run, tmp_path, *where, answer["id"])
        strip = of_kind(parts, "strip")[0]
        assert strip["reasons"] == found["explanations"][0]["reasons"] and strip["reasons"][0]["cause"] == "hit"
        parts, found = written(run, tmp_path, *where)
        assert of_kind(parts, "causes")[0]["causes"] == found["tokens_by_cause"]


@pytest.mark.parametrize("name", ["replay", "plan"])
def test_a_page_that_cannot_be_written_is_bad_input(run: Run, tmp_path: Path, name: str) -> None:
    what = SHORT if name == "replay" else ("llama-3.1-8b", "--gpu", "h100-80gb")
    done = run(name, *what, "--json", "--html", tmp_path / "none" / "page.html")
    assert done.exit_code == 2 and "cannot be written" in json.loads(done.stderr)["error"]["message"]
