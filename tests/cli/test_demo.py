"""The demo, act by act, with the tiny model in place of the plain one: all of it must show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.cli import demo
from quire.cli.demo_pools import HYBRIDS
from quire.cli.demo_server import start_error
from quire.cli.demo_tiers import tier_ticks
from tests.cli.conftest import Run


def act_of(run: Run, *options: object) -> dict[str, Any]:
    done = run("demo", "--turns", "2", "--json", *options)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_server_shows_reuse_eviction_refusal_and_no_leak(run: Run, tiny_model: Path) -> None:
    check_server(act_of(run, "--model", tiny_model, "--edition", "plain", "--conversations", "4"))


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_show_their_pools(run: Run, name: str) -> None:
    check_hybrids(act_of(run, "--edition", name)["hybrids"])


@pytest.mark.slow
def test_all_acts_one_after_the_other(run: Run, tiny_model: Path) -> None:
    found = act_of(run, "--model", tiny_model)
    check_server(found)
    assert list(found["hybrids"]) == list(HYBRIDS)
    check_hybrids(found["hybrids"])
    check_tiers(found["tiers"])


def check_server(found: dict[str, Any]) -> None:
    assert set(found["checks"].values()) == {True}
    assert found["reused_tokens"] > 0
    assert found["evicted_pages"] > 0
    assert found["shared_pages"] > 0
    assert found["private_pages_at_idle"] == 0
    assert found["refusal"]["status"] == 413
    assert "--kv-memory" in found["refusal"]["message"]
    first, second = found["reused_by_turn"]
    assert 0 < first["cached_tokens"] < first["prompt_tokens"]
    assert second["cached_tokens"] > 0
    assert found["output_tokens_per_s"] > 0


def check_tiers(found: dict[str, Any]) -> None:
    assert set(found["checks"].values()) == {True}
    first, second, third = found["runs"]
    assert first["answer"] == second["answer"] == third["answer"]
    assert first["host"] > first["storage"] == 0
    assert 0 < second["storage"] < third["storage"]
    assert second["defects"] == {"storage:digest": 1}
    assert first["defects"] == third["defects"] == {}
    assert min(first["moved_bytes"][link] for link in ("save", "load", "archive")) > 0
    assert found["tiers"]["host"]["tokens"] > found["pool_tokens"]


def check_hybrids(found: dict[str, dict[str, Any]]) -> None:
    for edition, act in found.items():
        assert set(act["checks"].values()) == {True}
        assert act["model"] == f"quire-bundled-{edition}"
        assert act["equal_answers"] == act["answers"] == 9
        assert act["evicted_pages"] == 0
        reused = [row["cached_tokens"] for row in act["reused_by_turn"]]
        assert sum(reused) == act["reused_tokens"] > 0
        assert all(reused), "the first turn shares the system prompt, the others their own prefixes too"
        for pool in act["pools"].values():
            assert pool["free"] + pool["cached"] == pool["total"]
            assert pool["bytes"] > 0
        if edition == "window":
            assert list(act["pools"]) == ["full", "window"]
            assert act["pools"]["window"]["dropped"] > act["pools"]["full"]["dropped"] == 0
        else:
            assert list(act["pools"]) == ["full", "state"]
            assert act["pools"]["state"]["total"] == 9
            assert act["pools"]["state"]["left"] > act["pools"]["full"]["left"] == 0


def test_pools_are_shown_for_people(run: Run) -> None:
    shown = run("demo", "--edition", "recurrent", env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert "quire-bundled-recurrent" in lines[0]
    rows = {words[1]: words[2:4] for words in map(str.split, lines) if len(words) > 4}
    assert rows["Pool"] == ["full", "state"]
    full, state = rows["Left"]
    assert int(state) > int(full) == 0
    assert f"✓ states were left for others to begin on: {state}" in lines
    assert "✓ no frame leaked" in lines


def test_pools_with_room_for_all_show_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HYBRIDS, "window", replace(HYBRIDS["window"], settings={"kv_memory": "64MiB"}))
    shown = run("demo", "--edition", "window", "--json")
    assert shown.exit_code == 4
    assert json.loads(shown.stdout)["hybrids"]["window"]["pools"]["window"]["dropped"] == 0
    message = json.loads(shown.stderr)["error"]["message"]
    assert "windows were dropped while their pages stayed" in message
    assert "prefixes were reused" not in message


def found_tiers(**second: Any) -> dict[str, Any]:
    """As three servers would leave it, but for what is said of the second."""
    run = {"answer": "He was.", "prompt_tokens": 100, "device": 0, "host": 0, "storage": 96, "private_frames": 0}
    run |= {"moved_bytes": {"load": 5, "fetch": 5}, "defects": {}}
    damaged = run | {"storage": 80, "defects": {"storage:digest": 1}} | second
    return {"runs": [run | {"host": 96, "storage": 0}, damaged, run], "stranger": run | {"storage": 0}}


@pytest.mark.parametrize(
    ("second", "missing"),
    [
        ({}, ""),
        ({"storage": 96, "defects": {}}, "one damaged record"),
        ({"defects": {"storage:digest": 2}}, "one damaged record"),
        ({"storage": 0}, "it came from storage"),
        ({"answer": "She was."}, "the same answer"),
        ({"private_frames": 1}, "no frame leaked"),
    ],
)
def test_ticks_of_the_tiers_can_fail(second: dict[str, Any], missing: str) -> None:
    failed = [tick.name for tick in tier_ticks(found_tiers(**second)) if not tick.passed]
    assert any(missing in name for name in failed) if missing else not failed


def test_a_demo_that_shows_nothing_fails(run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        def __enter__(self) -> dict[str, object]:
            return {}

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(demo, "running_server", lambda *_: Server())
    monkeypatch.setattr(demo, "_show", lambda *_, **__: {"checks": {"tokens were reused": False}})
    shown = run("demo", "--model", tiny_model, "--edition", "plain", "--json")
    assert shown.exit_code == 4
    assert "tokens were reused" in json.loads(shown.stderr)["error"]["message"]


def test_a_server_that_cannot_start_is_reported_in_its_own_words() -> None:
    said = {"error": {"message": "no room.", "fix": "make room.", "code": "QUIRE-PLAN-01"}}
    error = start_error(f"WARNING something\n{json.dumps(said)}\n", 3)
    assert (error.message, error.fix, error.code, error.exit_code) == ("no room.", "make room.", "QUIRE-PLAN-01", 3)
    assert "Killed" in start_error("Killed", -9).message
    assert "-9" in start_error("", -9).message


def test_without_a_model_there_is_no_demo(run: Run, tmp_path: Path) -> None:
    shown = run("demo", "--model", tmp_path)
    assert shown.exit_code == 2
    assert "no model" in shown.stderr
