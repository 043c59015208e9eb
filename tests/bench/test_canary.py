"""The measurement of the canary at toy size, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "engine" / "canary.py"


@slow_unless_changed("bench/engine/", "bench/harness.py")
@pytest.mark.parametrize("options", [(), ("--long",)], ids=["short", "long"])
def test_the_measurement_runs(options: tuple[str, ...], tmp_path: Path) -> None:
    """It fails by itself where nothing is looked at."""
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", *options, "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(written.read_text())
    assert 0 < found["took_median"] < 1
    assert len(found["rate_ratios"]) == found["runs"]
