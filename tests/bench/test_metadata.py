"""The comparison of bookkeeping costs at toy size, so that it cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "metadata.py"


def test_the_comparison_runs(tmp_path: Path) -> None:
    """It fails by itself where an operation of Quire's found something else than the work has."""
    written, bars = tmp_path / "result.json", tmp_path / "bars.svg"
    command = [sys.executable, str(BENCH), "--toy", "--json", str(written), "--plot", str(bars)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goal" not in done.stdout
    rows = json.loads(written.read_text())["rows"]
    assert len(rows) > 30
    assert all(row["systems"]["quire"]["cpu_us"] > 0 for row in rows)
    assert bars.read_text().count("<svg") == 1
