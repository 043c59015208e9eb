"""The comparison of two checkouts at toy size, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

ROOT = Path(__file__).parents[2]


@slow_unless_changed("bench/engine/checkouts.py", "bench/harness.py")
def test_this_checkout_beside_itself(tmp_path: Path) -> None:
    """It fails by itself where tokens differ; each model has a ratio for each batch."""
    written = tmp_path / "result.json"
    program = ROOT / "bench" / "engine" / "checkouts.py"
    done = run_program(program, ROOT, "--toy", "--dtype", "float32", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    ratios = json.loads(written.read_text())["ratios"]["float32"]
    assert {model: set(batches) for model, batches in ratios.items()} == {
        "llama-55M": {"16 cold", "16 warm", "1"},
        **{f"quire-bundled{end}": {"1", "16"} for end in ("", "-window", "-recurrent")},
    }
    assert all(row["equal"] == 1 and row["time"] > 0 for batches in ratios.values() for row in batches.values())
