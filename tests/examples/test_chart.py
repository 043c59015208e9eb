"""`examples/chart.py`: the pictures of a replay and of a sweep, from their JSON."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.cli.conftest import run
from tests.examples.generated_sections import ROOT

__all__ = ["run"]

REPLAY = ("replay", "chat:requests=8", "--pool-tokens", "1/2,1", "--policy", "lru,lfu")
SWEEP = ("plan", "llama-3.1-8b", "--kv-memory", "8GiB", "--sweep", "context")


@slow_unless_changed("examples/chart.py", "src/quire/cli/")
@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
@pytest.mark.parametrize("command", [REPLAY, SWEEP], ids=["replay", "sweep"])
def test_json_is_drawn(run, tmp_path: Path, command: tuple[str, ...], suffix: str, magic: bytes) -> None:
    path = tmp_path / f"picture.{suffix}"
    printed = run(*command, "--json")
    assert printed.exit_code == 0, printed.stderr
    program = (sys.executable, "examples/chart.py", str(path))
    subprocess.run(program, cwd=ROOT, input=printed.stdout, text=True, check=True)
    assert path.read_bytes().startswith(magic)
    assert suffix == "png" or path.read_text().count("<path") > 10
