"""The benchmark of speculation at toy size, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "engine" / "speculation.py"


@slow_unless_changed("bench/engine/", "bench/harness.py")
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """It fails by itself where an answer is not the given one."""
    written, document = tmp_path / "rows.json", tmp_path / "table.md"
    document.write_text("before\n<!-- speculation -->\nold\n<!-- end of speculation -->\nafter\n")
    done = run_program(BENCH, "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(written.read_text())["rows"]
    assert {row["load"] for row in rows} == {"code", "prose"}
    assert all(row["acceptance"] > 0 for row in rows if row["load"] == "code"), "no draft was right"
    done = run_program(BENCH, "--read", written, "--readme", document)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = document.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert len([line for line in lines if line.startswith("| bundled |")]) == 2
