"""Cases that run inside another engine: pytest under its own interpreter, and what became of each.

`bench/peers/install.py` makes the interpreters; the folder is `QUIRE_PEERS`, or that of the benchmarks.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


def python_of(name: str) -> str:
    """The interpreter of a peer. Skips the test where it is not installed."""
    peers = Path(os.environ.get("QUIRE_PEERS") or Path.home() / ".cache" / "quire-bench")
    python = peers / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{name} is not installed in {peers}: bench/peers/install.py does it")
    return str(python)


def names_of(cases: Path) -> list[str]:
    """The cases of a module that this interpreter cannot import."""
    return re.findall(r"^def (test_\w+)\(", cases.read_text(), re.MULTILINE)


def outcomes_of(name: str, cases: Sequence[Path], folder: Path, plugin: str) -> dict[str, str]:
    """How each case ended, by name: what failed, or nothing. `plugin` is a module with their fixtures."""
    report = folder / "report.xml"
    environment = {at: value for at, value in os.environ.items() if not at.startswith("PYTEST")}
    environment |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": f"{ROOT}/src:{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        python_of(name),
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "--basetemp",
        str(folder / "cases"),
        "--noconftest",
        "-q",
    ]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", plugin, "--junitxml", str(report), *map(str, cases)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        said = "\n".join(each.text or "" for each in case if each.tag in ("failure", "error"))
        function = case.get("name", "").partition("[")[0]
        outcomes[function] = outcomes.get(function, "") + said
    return outcomes
