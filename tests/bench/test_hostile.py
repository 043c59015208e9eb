"""Hostile grammars are answered and end no server, so that the measurement cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "serving" / "hostile.py"


@pytest.mark.slow
def test_each_is_answered(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(written.read_text())["rows"]
    statuses = {status for name, row in rows.items() if name != "alone" for status in row["statuses"]}
    assert len(rows) > 15 and statuses <= {200, 400, 413, 503}
