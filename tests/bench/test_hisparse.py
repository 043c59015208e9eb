"""The measurements of HiSparse at toy size, so that they cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "sparse" / "hisparse.py"
SELECTIONS = BENCH.parents[1] / "results" / "selections-dsa-0.7.npz"


@slow_unless_changed("bench/sparse/", "bench/harness.py")
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
    most = {row["latents"]: row["peak_running"] for row in result["offered"] if row["offered"] == 20}
    assert most["in host memory"] >= 3.5 * most["on the device"]
    found = result["break_even"]
    assert most["on the device"] == found["planned_resident"] and most["in host memory"] <= found["planned_hisparse"]
    assert found["planned_break_even"] is not None or found["planned_loses"]
    assert found["measured"].keys() == {
        "decode_tokens_per_cpu_s",
        "decode_tokens_per_s",
        "tokens_per_cpu_s",
        "tokens_per_s",
    }
