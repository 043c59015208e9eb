"""The benchmark of chunks beside decodes at toy size, so that it cannot rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "engine" / "chunk_budget.py"


@slow_unless_changed("bench/engine/", "bench/harness.py")
@pytest.mark.parametrize(("options", "lines"), [((), 14), (("--engine", "--toy"), 2)])
def test_the_benchmark_runs(options: tuple[str, ...], lines: int) -> None:
    done = run_program(BENCH, "--clients", "2", *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert len(rows) == lines and all(float(row[-1].replace(",", "")) > 0 for row in rows)
