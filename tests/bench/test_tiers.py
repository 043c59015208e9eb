"""What tiers cost and bring, at toy size, so that the measurement cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "tiers.py"


def test_the_measurement_runs(tmp_path: Path) -> None:
    """Sessions that return hit the host, and those of a new process hit what is stored."""
    written = tmp_path / "result.json"
    command = [sys.executable, str(BENCH), "--toy", "--only", "directory", "--only", "ttft", "--json", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(written.read_text())
    assert len(result["directory"]) == 4
    found = result["ttft"]
    assert set(found["returning"]) == {"none", "host", "host and directory"}
    assert found["returning"]["host"]["hit_tokens"] > 0
    assert found["never seen before"]["host"]["hit_tokens"] == 0
