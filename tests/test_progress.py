"""A run in several processes says what it collects: one of them for all, now and then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.progress import EVERY_S, Progress

ROOT = Path(__file__).parents[1]

CONFTEST = """
from tests.progress import Progress
def pytest_configure(config):
    config.pluginmanager.register(Progress(config))
"""


def said(config: Any, num_tests: int) -> list[str]:
    """What a process says that finds so many tests, eight in each `EVERY_S`."""
    lines: list[str] = []
    now = [0.0]
    progress = Progress(config, lines.append, lambda: now[0])
    for _ in range(num_tests):
        now[0] += EVERY_S / 8
        progress.pytest_itemcollected()
    return lines


def test_the_first_process_speaks_for_all() -> None:
    first, second = (SimpleNamespace(workerinput={"workerid": name}) for name in ("gw0", "gw1"))
    assert said(first, 30) == [f"==> {count} tests found so far" for count in (8, 16, 24)]
    assert said(second, 30) == said(SimpleNamespace(), 30) == []


def test_a_run_in_two_processes_says_once_how_many_tests_it_has(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    options = ["-n", "2", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (done.stdout + done.stderr).count("==> 2 tests to run") == 1, done
