"""The comparison of bookkeeping costs at toy size, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "bookkeeping" / "metadata.py"

NAMES = {
    *("step-full-8-16", "step-full+state-8-64", "turnover-full-8", "calls-full-8", "engine-step-full-8"),
    *("followers", "llm_step", "match-256-1", "match-edge-1", "free-finish", "evict-128-16"),
    *("insert-again-1", "evict-pause", "decode-16", "decode-commit-full-64", "admit-off", "admit-on"),
    "replay-small-64",
}
"""Rows that goals name, at toy size."""


@slow_unless_changed("bench/bookkeeping/", "bench/harness.py", "bench/peers/")
def test_the_comparison_runs(tmp_path: Path) -> None:
    """It fails by itself where an operation of Quire's found something else than the work has."""
    written, bars = tmp_path / "result.json", tmp_path / "bars.svg"
    done = run_program(BENCH, "--toy", "--json", written, "--plot", bars)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goal" not in done.stdout
    rows = json.loads(written.read_text())["rows"]
    assert len(rows) > 60
    assert {row["name"] for row in rows} >= NAMES
    step = next(row for row in rows if row["name"] == "step-full+window-16-16")["systems"]["quire"]
    assert set(step["parts"]) == {"schedule", "launch", "settle"}
    assert step["cpu_us_min"] <= step["cpu_us"] <= step["cpu_us_max"]
    without_time = {row["name"] for row in rows if row["systems"]["quire"]["cpu_us"] <= 0}
    assert without_time <= {"llm_step"}  # a difference of two short runs, which a busy machine turns round
    assert bars.read_text().count("<svg") == 1
