"""Whole engines within a limit on memory: what is too much is refused at the start, and what starts stays as large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.containers import GIB
from tests.engine.containers import four_gib as four_gib

ROOT = Path(__file__).parents[2]
MIB = 2**20


def told(*arguments: object, timeout: float = 300) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.soaking", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_soak(found: dict[str, Any]) -> None:
    assert found["failed"] == 0
    assert found["turns"] > 10 and found["samples"] > 5
    assert found["saved_bytes"] > 0 and found["loaded_bytes"] > 0 and found["archived_bytes"] > 0


@pytest.mark.slow
def test_4_gib_refuse_an_engine_of_8_and_start_one_of_what_they_name(four_gib: Path) -> None:
    found = told("refuse", four_gib)
    assert "8.00 GiB of host memory were asked for" in found["said"]
    assert "the container's limit is 4.00 GiB" in found["said"]
    assert 2.5 * GIB < found["num_bytes"] < 4 * GIB
    assert len(found["tokens"]) == 6


@pytest.mark.slow
def test_load_for_a_moment(tmp_path: Path) -> None:
    """The same load without a limit, and too short to say how memory grows."""
    check_soak(told("soak", "-", tmp_path / "kv", 12))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_engine_that_chooses_for_itself_stays_as_large(four_gib: Path, tmp_path: Path) -> None:
    """For ten minutes, or QUIRE_SOAK_SECONDS. A tenth of a percent of the limit in a minute would be a leak."""
    seconds = float(os.environ.get("QUIRE_SOAK_SECONDS", "600"))
    found = told("soak", four_gib, tmp_path / "kv", seconds, timeout=seconds + 300)
    print(found)
    check_soak(found)
    assert found["slope"] * 60 < 4 * MIB, found
