"""The profile of a step at toy size, so that it cannot rot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "step_profile.py"


@pytest.mark.parametrize("kind", ["full", "full+window"])
def test_the_profile_runs(kind: str) -> None:
    command = [sys.executable, str(BENCH), "--toy", "--running", "4", "--kind", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = {cells[1].strip(): float(cells[2]) for line in done.stdout.splitlines()[2:] if (cells := line.split("|"))}
    assert rows["scheduler/scheduler"] >= 2
    assert rows["all"] == pytest.approx(sum(calls for name, calls in rows.items() if name != "all"), abs=2)
