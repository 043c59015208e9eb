"""Benchmarks that do not run in each test run import what is there: a name that moved is seen at once."""

from __future__ import annotations

from pathlib import Path

from tests.programs import run_program

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


def test_every_benchmark_imports(tmp_path: Path) -> None:
    """But for peers, which are installed apart."""
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "bench").rglob("*.py")) if path.parent.name != "peers"]
    names = [".".join(file.with_suffix("").parts) for file in files]
    assert len(names) > 40
    program = tmp_path / "imports.py"
    program.write_text(_IMPORTS)
    done = run_program(program, *names, cwd=ROOT)
    assert done.returncode == 0, done.stderr
