"""The measurement of the output path at toy size, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "serving" / "output_path.py"


@slow_unless_changed("bench/serving/", "bench/harness.py")
def test_the_measurement_runs(tmp_path: Path) -> None:
    """It fails by itself where a client misses a token."""
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(written.read_text())["rows"]
    assert len(rows) == 3
    assert all(row["front_us"] > 0 and row["engine_us"] > 0 and row["latency_us"]["median"] > 0 for row in rows)
