"""What a small crowd of idle and slow connections costs, so that the measurement cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "serving" / "connections.py"


@slow_unless_changed("bench/serving/", "bench/harness.py")
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """It fails by itself where the client is not answered."""
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(written.read_text())
    assert result["idle"] + result["slow"] > 50
    assert all(count >= 3 for count in result["requests"])
    assert result["whole_ms"]["beside"]["median"] > 0
