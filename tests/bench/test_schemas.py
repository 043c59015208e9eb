"""Outputs of generated schemas, so that the measurement cannot rot; with QUIRE_OUTPUTS as many as it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "engine" / "schemas.py"


@pytest.mark.slow
def test_no_output_violates_its_schema() -> None:
    done = run_program(BENCH, "--outputs", os.environ.get("QUIRE_OUTPUTS", "300"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("'violations': 0") == 3
