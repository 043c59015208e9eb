"""The demo, on the tiny model: all of it must show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli import demo
from quire.cli.demo_server import start_error
from tests.cli.conftest import Run


def test_the_demo_shows_reuse_eviction_refusal_and_no_leak(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "quire", "demo", "--model", str(tiny_model), "--turns", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
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


def test_a_demo_that_shows_nothing_fails(run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        def __enter__(self) -> dict[str, object]:
            return {}

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(demo, "running_server", lambda *_: Server())
    monkeypatch.setattr(demo, "_show", lambda *_, **__: {"checks": {"tokens were reused": False}})
    shown = run("demo", "--model", tiny_model, "--json")
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
