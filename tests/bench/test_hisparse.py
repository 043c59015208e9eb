"""The measurements of HiSparse at toy size, so that they cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "hisparse.py"
SELECTIONS = BENCH.parent / "results" / "selections-dsa-0.7.npz"


def test_the_measurement_runs(tmp_path: Path) -> None:
    """It fails by itself where latents in host memory give other tokens."""
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--json", written, "--selections", SELECTIONS)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(written.read_text())
    assert all(row["us"]["min"] > 0 for row in result["bookkeeping"])
    assert all(row["times"] >= 4 for row in result["capacity"])
    recorded = [row for row in result["hit_rates"] if row["selections"].startswith("recorded")]
    assert recorded and all(0 <= row["gap"] <= 0.05 for row in recorded)
    assert {row["latents"] for row in result["engine"]} == {"on the device", "in host memory"}
    assert all(row["swapped_bytes_per_step"] > 0 for row in result["engine"] if row["buffer"])
