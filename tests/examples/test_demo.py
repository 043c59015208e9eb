"""The demo: all of it must show what it promises, and it says so where it does not."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from examples.demo.scenes import SCENES, TITLES, app
from examples.demo.tiers import server_process, tier_ticks
from typer.testing import CliRunner

from quire.errors import start_error
from tests.changes import slow_unless_changed
from tests.cli.conftest import Run


@pytest.fixture
def run() -> Run:
    """Runs the demo with arguments, in this process."""
    return lambda *words, **options: CliRunner().invoke(app, [str(word) for word in words], **options)


def act_of(run: Run, *options: object) -> dict[str, Any]:
    done = run("--json", *options)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_plain_model_shows_reuse_eviction_refusal_and_no_leak(run: Run) -> None:
    check_plain(act_of(run, "--scene", "plain", "--turns", 2)["plain"])


@slow_unless_changed("examples/", "src/quire/serve/", "src/quire/models/")
@pytest.mark.parametrize("name", ["window", "recurrent"])
def test_hybrids_show_their_pools(run: Run, name: str) -> None:
    check_hybrid(name, act_of(run, "--scene", name)[name])


def test_its_servers_have_no_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}

    def start(*_: object, env: dict[str, str], **__: object) -> None:
        found.update(env)
        raise FileNotFoundError

    monkeypatch.setenv("QUIRE_API_KEY", "key")
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(FileNotFoundError), server_process():
        pass
    assert "PATH" in found and "QUIRE_API_KEY" not in found


@pytest.mark.slow
def test_all_scenes_one_after_the_other(run: Run) -> None:
    found = act_of(run)
    assert list(found) == [*TITLES, "seconds"]
    check_plain(found["plain"])
    for name in ("window", "recurrent"):
        check_hybrid(name, found[name])
    check_tiers(found["tiers"])


def check_plain(found: dict[str, Any]) -> None:
    assert set(found["checks"].values()) == {True}
    assert len(found["checks"]) == 8
    assert 0 < found["hit_tokens"] < found["prompt_tokens"]
    assert found["evicted_pages"] > 0
    assert found["peak_shared_pages"] > 0
    assert found["pools"]["full"]["private"] == 0
    assert found["refusal"]["status"] == 413
    assert "--kv-memory" in found["refusal"]["message"]
    assert found["largest_served_tokens"] == found["largest_request"] == 96 * 16 + 1
    assert all(found["hit_tokens_by_turn"])


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


def check_hybrid(name: str, act: dict[str, Any]) -> None:
    assert set(act["checks"].values()) == {True}
    assert act["model"] == f"quire-bundled-{name}"
    assert act["equal_answers"] == act["answers"] == 9
    assert act["evicted_pages"] == 0
    reused = act["hit_tokens_by_turn"]
    assert 0 < sum(reused) <= act["hit_tokens"]
    assert all(reused), "the first turn shares the system prompt, the others their own prefixes too"
    for pool in act["pools"].values():
        assert pool["free"] + pool["cached"] == pool["total"]
    if name == "window":
        assert list(act["pools"]) == ["full", "window"]
        assert act["pools"]["window"]["dropped"] > act["pools"]["full"]["dropped"] == 0
    else:
        assert list(act["pools"]) == ["full", "state"]
        assert act["pools"]["state"]["total"] == 9
        assert act["pools"]["state"]["left"] > act["pools"]["full"]["left"] == 0


def test_a_scene_is_shown_for_people(run: Run) -> None:
    shown = run("--scene", "recurrent", env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("The demo takes less than half a minute")
    assert lines[1] == f"  1. {TITLES['recurrent']}"
    [saved] = [line.strip("│ ") for line in lines if "checkpoints of states saved" in line]
    full, state = (int(part.split()[-1]) for part in saved.partition(":")[0].split(","))
    assert state > full == 0
    assert f"✓ checkpoints of states were saved for others: {state}" in lines
    assert "✓ no frame leaked" in lines
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("title", TITLES.values())
def test_titles_fit_a_narrow_terminal(title: str) -> None:
    assert len(f"⠋ 1 of {len(TITLES)}: {title} ...") <= 60


def test_pools_with_room_for_all_show_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCENES, "window", SCENES["window"]._replace(settings={"kv_memory": "64MiB"}))
    shown = run("--scene", "window", "--json")
    assert shown.exit_code == 4
    assert json.loads(shown.stdout)["window"]["pools"]["window"]["dropped"] == 0
    message = json.loads(shown.stderr)["error"]["message"]
    assert "windows were reclaimed while their prefixes stayed cached" in message
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


def test_a_server_that_cannot_start_is_reported_in_its_own_words() -> None:
    said = {"error": {"message": "no room.", "fix": "make room.", "code": "QUIRE-PLAN-01"}}
    error = start_error(f"WARNING something\n{json.dumps(said)}\n", 3)
    assert (error.message, error.fix, error.code, error.exit_code) == ("no room.", "make room.", "QUIRE-PLAN-01", 3)
    assert "Odd" in start_error("Odd", 1).message
    assert "code 3" in start_error("", 3).message
    killed = start_error("2026-12-01 WARNING what it did before", -9)
    assert "killed by signal 9" in killed.message and "--kv-memory" in killed.fix
