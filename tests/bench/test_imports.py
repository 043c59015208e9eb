"""Benchmarks that do not run in each test run import what is there: a name that moved is seen at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("quire", "bench", "tests"):
            raise
"""


def test_every_benchmark_imports() -> None:
    """But for peers, which are installed apart."""
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "bench").rglob("*.py")) if path.parent.name != "peers"]
    names = [".".join(file.with_suffix("").parts) for file in files]
    assert len(names) > 40
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
