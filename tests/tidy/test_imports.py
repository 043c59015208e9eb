"""The layers, as import-linter reads them from pyproject.toml, and that planning starts without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WITHOUT_TORCH = ("quire.errors", "quire.spec.model", "quire.plan.budget", "quire.prefix.radix_cache")
WITHOUT_TORCH += ("quire.memory.allocator", "quire.memory.residency", "quire.observe.events", "quire.cache")
WITHOUT_TORCH += (
    "quire.sim.trace",
    "quire.sim.hit_bounds",
    "quire.memory.record",
    "quire.memory.host_pool",
    "quire.plan.host",
)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False
    )


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}


def test_imports_point_down_only() -> None:
    pytest.importorskip("importlinter", reason="import-linter is a development dependency")
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    found = python("-c", code)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "KEPT" in found.stdout


def test_planning_and_bookkeeping_start_without_torch() -> None:
    code = f"import sys, {', '.join(WITHOUT_TORCH)}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    found = python("-c", code)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr
