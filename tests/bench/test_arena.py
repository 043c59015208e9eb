"""The benchmark of arenas at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "arena.py"
SHARED = BENCH.parents[2] / "shared" / "data" / "configs"


@slow_unless_changed("bench/arena.py")
@pytest.mark.skipif(not SHARED.exists(), reason="the published configurations are not beside the repository")
def test_the_benchmark_of_arenas_runs(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    picture = tmp_path / "picture.svg"
    done = run_program(BENCH, "--toy", "--models", "MiMo-V2-Flash", "--json", written, "--plot", picture)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(written.read_text())["models"]["MiMo-V2-Flash"]
    assert "MiMo-V2-Flash" in picture.read_text()
    assert found["arena"]["hit_rate"] > 0 and found["arena"]["moved_bytes"] > found["static"]["moved_bytes"] == 0


@slow_unless_changed("bench/arena.py")
@pytest.mark.skipif(not SHARED.exists(), reason="the published configurations are not beside the repository")
def test_the_best_mix_of_each_phase_is_no_worse_than_the_best_one_mix(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    options = ("--toy", "--ideal", "--seeds", "20", "--models", "MiMo-V2-Flash")
    done = run_program(BENCH, *options, "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads(written.read_text())["models"]["MiMo-V2-Flash"]
    assert found["best_by_phase"] >= found["best_mix"] >= found["now"] > 0
