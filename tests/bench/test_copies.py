"""The measurement of copies at toy size, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "storage" / "copies.py"


def test_the_measurement_runs(tmp_path: Path) -> None:
    """It fails by itself where a byte is wrong."""
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--pages", "16KiB,256KiB", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(written.read_text())
    assert [row["page_bytes"] for row in result["rows"]] == [2**14, 2**18]
    assert all(min(row["gb_per_second"].values()) > 0 for row in result["rows"])
    assert [row["threads"] for row in result["touch"]] == [1, 2]
