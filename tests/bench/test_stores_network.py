"""The comparison of stores with their clients at toy size, so that it cannot rot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "storage" / "network.py"


def test_the_comparison_runs(tmp_path: Path) -> None:
    """It fails by itself where a record comes back changed."""
    if not (shutil.which("valkey-server") or shutil.which("redis-server")):
        pytest.skip("neither valkey-server nor redis-server is on PATH")
    written = tmp_path / "rows.json"
    done = run_program(BENCH, "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(written.read_text())
    assert {(row["system"], row["verb"]) for row in rows} >= {("ValkeyStore", "put"), ("redis-py", "get")}
    assert all(row["gb_per_s"] > 0 for row in rows)
