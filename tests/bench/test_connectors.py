"""The comparison with SGLang's own backend at toy size, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.connectors.peer import python_of
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "connectors" / "sglang_hicache.py"


@slow_unless_changed("bench/connectors/", "bench/peers/hicache", "bench/harness.py")
def test_the_comparison_with_sglang_runs(tmp_path: Path) -> None:
    """It fails by itself where other bytes come back."""
    peers, written = Path(python_of("sglang-cache")).parents[2], tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--peers", peers, "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(written.read_text())["rows"]
    assert {row["row"] for row in rows} == {"save", "load", "load again", "load from disk", "load one by one"}
    assert all(row["cpu_ms"]["quire"] > 0 for row in rows)
    assert all(row["ratio"]["quire"] > 0 for row in rows if row["row"] != "load one by one")
