"""The measurements of attention plans and of verified rows at toy size, so that they cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "attention_plan.py"


def test_the_measurement_runs(tmp_path: Path) -> None:
    """It fails by itself where a kept plan reads other tokens than a fresh one."""
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(written.read_text())["rows"]
    assert len(rows) > 15
    assert all(row["later_us"]["min"] > 0 for row in rows)


def test_verified_rows_are_measured(tmp_path: Path) -> None:
    """It fails by itself where batched rows and segments of each sequence give other outputs."""
    written = tmp_path / "result.json"
    done = run_program(BENCH.with_name("verify_rows.py"), "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(written.read_text())
    assert {row["name"][0] for row in rows} == {"1", "8"}
    assert all(row["batched_us"]["min"] > 0 for row in rows)


def test_attention_of_decode_steps_is_measured(tmp_path: Path) -> None:
    """It fails by itself where the backends differ."""
    written = tmp_path / "result.json"
    done = run_program(BENCH.with_name("decode_attention.py"), "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["native_ms"] > 0 for row in json.loads(written.read_text())["rows"])
