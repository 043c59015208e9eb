"""The bench of events at toy size, so that it cannot rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "bookkeeping" / "events.py"


def test_the_bench_runs() -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    done = run_program(BENCH, "--toy")
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines()[::3]] == [
        "  1 pages a run",
        "  4 pages a run",
        " 64 pages a run",
    ]
