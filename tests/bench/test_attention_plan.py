"""The measurement of attention plans at toy size, so that it cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "attention_plan.py"


def test_the_measurement_runs(tmp_path: Path) -> None:
    """It fails by itself where a kept plan reads other tokens than a fresh one."""
    written = tmp_path / "result.json"
    command = [sys.executable, str(BENCH), "--toy", "--json", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(written.read_text())["rows"]
    assert len(rows) > 15
    assert all(row["later_us"]["min"] > 0 for row in rows)
