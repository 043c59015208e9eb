"""The layers, as import-linter reads them from pyproject.toml, and what needs torch."""

from __future__ import annotations

import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[2]

WITH_TORCH = (
    "quire.models",
    "quire.kernels",
    "quire.engine",
    "quire.canary",
    "quire.upload",
    "quire.sparse.coordinator",
)
WITH_TORCH += ("quire.memory.backing", "quire.memory.pool", "quire.memory.frame_copies")
WITH_TORCH += ("quire.connectors.sglang.hicache", "quire.connectors.sglang.pool_pages", "quire.connectors.sglang.facts")
WITH_TORCH += tuple(f"quire.connectors.vllm.{name}" for name in ("compat", "facts", "metrics", "tier"))  # and vLLM
"""Packages and modules that need torch. All others are imported where it is not installed, new ones too."""


def python(code: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(root / "src"), "NO_COLOR": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def linted(root: Path) -> subprocess.CompletedProcess[str]:
    return python("from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))", root)


def test_imports_point_down_only() -> None:
    pytest.importorskip("importlinter", reason="import-linter is a development dependency")
    found = linted(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "KEPT" in found.stdout


def test_only_what_computes_on_tensors_needs_torch() -> None:
    names = [module.name for module in pkgutil.walk_packages(quire.__path__, "quire.")]
    without = [name for name in names if not name.endswith("__main__") and not _is_in(name, WITH_TORCH)]
    packages = {name.split(".")[1] for name in without}
    assert {"cli", "serve", "sim", "cache", "scheduler", "offload", "tiers", "transfer", "speculative"} <= packages
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None"
    found = python(f"{blocked}\nimport {', '.join(without)}")
    assert found.returncode == 0, found.stderr


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_a_new_package_may_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """The contracts list who may."""
    pytest.importorskip("importlinter", reason="import-linter is a development dependency")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src" / "quire" / "new").mkdir()
    (tmp_path / "src" / "quire" / "new" / "__init__.py").write_text("import torch\nimport transformers\n")
    found = linted(tmp_path)
    assert found.returncode == 1
    assert "quire.new -> torch (l.1)" in found.stdout and "quire.new -> transformers (l.2)" in found.stdout
