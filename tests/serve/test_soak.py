"""The soak run: clients that come and go on a pool too small for them. Short by default."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "bench" / "soak.py"


@pytest.mark.parametrize(
    ("clients", "seconds"),
    [(24, 3), pytest.param(200, 60, marks=pytest.mark.slow)],
)
def test_soak(clients: int, seconds: int) -> None:
    """Every answer equals its solo run, aborts happened, pages were evicted, and none is left behind."""
    command = [sys.executable, str(SOAK), "--clients", str(clients), "--seconds", str(seconds), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["answers"] > 0
    assert report["aborted"] > 0
    assert report["evicted_pages"] > 0
    assert report["hit_tokens"] > 0
    assert report["wrong"] == report["errors"] == report["private_pages_at_idle"] == 0
