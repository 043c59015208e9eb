"""What viewers of the page cost, in seconds, so that the measurement cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "serving" / "viewers.py"


@slow_unless_changed("bench/serving/", "bench/harness.py", "src/quire/serve/live.py", "src/quire/serve/tracing.py")
def test_the_benchmark_runs(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--viewers", "3", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(written.read_text())
    assert result["viewers"] == 3 and min(result["tokens_a_second"]) > 0
    assert min(result["spans"]["cpu_ms_a_token"]) > 0
