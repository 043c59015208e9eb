"""The measurement of moves at toy size, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "engine" / "moves.py"


@slow_unless_changed("bench/engine/moves.py", "bench/harness.py")
def test_the_measurement_runs(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--models", "recurrent", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(written.read_text())["models"]["recurrent"]
    assert found["without"]["steps"] > 0 and found["retreats"]["steps"] > 0
