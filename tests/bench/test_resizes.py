"""The benchmark of sizes that change under load, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "serving" / "resizes.py"


@slow_unless_changed("bench/serving/resizes.py", "bench/serving/timed_server.py")
@pytest.mark.timeout(900)
def test_sizes_change_under_load_and_nothing_is_lost(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--models", "recurrent", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    fixed, resized = json.loads(written.read_text())["models"]["recurrent"].values()
    assert fixed["requests"] > 0 and resized["sizes"] == 4 and not resized["wrong_tokens"] + resized["lost_requests"]
    assert not resized["audit"]["faults"] and not resized["audit"]["violation"]
    assert resized["turns"]["new_size"]["turns"] > 0 and resized["hit_rate_after"] > 50
