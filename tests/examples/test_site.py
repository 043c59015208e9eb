"""The documentation site builds without a warning: every link leads somewhere, every name has its docstring."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.generated_sections import ROOT


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))),
    reason="MkDocs is not installed; `make docs` installs it",
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in (
        "index.html",
        "ARCHITECTURE/index.html",
        "examples/index.html",
        "source/examples/06_engine_loop.py/index.html",
    ):
        assert (tmp_path / "site" / page).exists(), page
    assert "launched" in (tmp_path / "site" / "reference" / "python" / "index.html").read_text(encoding="utf-8")
