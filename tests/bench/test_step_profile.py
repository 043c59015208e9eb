"""The profile of a step at toy size, so that it cannot rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "bookkeeping" / "step_profile.py"


@pytest.mark.parametrize("kind", ["full", "full+window"])
def test_the_profile_runs(kind: str) -> None:
    done = run_program(BENCH, "--toy", "--running", "4", "--kind", kind)
    assert done.returncode == 0, done.stderr
    rows = {cells[1].strip(): float(cells[2]) for line in done.stdout.splitlines()[2:] if (cells := line.split("|"))}
    assert rows["scheduler/scheduler"] >= 2
    assert rows["all"] == pytest.approx(sum(calls for name, calls in rows.items() if name != "all"), abs=2)
