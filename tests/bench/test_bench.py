"""The engine benchmark at toy size, so that it cannot rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "engine" / "compare.py"


@slow_unless_changed("bench/engine/", "bench/harness.py")
@pytest.mark.parametrize("engines", ["quire,generate", pytest.param("quire,generate,cb", marks=pytest.mark.slow)])
def test_the_engine_benchmark_runs(engines: str) -> None:
    """It fails by itself where Quire's float32 tokens are not `generate`'s, or where a warm batch reused nothing."""
    done = run_program(BENCH, "--toy", "--threads", "1", "--engines", engines)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Quire" in done.stdout + done.stderr


@slow_unless_changed("bench/engine/", "bench/harness.py")
def test_the_profile_of_the_engine_runs() -> None:
    done = run_program(BENCH, "--toy", "--threads", "1", "--profile")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "other model code" in done.stdout + done.stderr
