"""The benchmark of grammars at toy size, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "engine" / "grammar.py"


@slow_unless_changed("bench/engine/grammar.py", "bench/peers/grammar_worker.py")
def test_the_benchmark_runs(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(written.read_text())
    assert set(found["ratios"]) == {"schema to without", "record, drafts to record"}
    [record] = found["rows"]["record, drafts"]
    assert 0 < record["accepted"] <= record["drafts"]
