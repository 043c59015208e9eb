"""The benchmarks of connectors and of roles at toy size, so that they cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "transfer" / "connectors.py"
ROLES = BENCH.with_name("engines.py")


@slow_unless_changed("bench/transfer/", "bench/harness.py")
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """It fails by itself where a byte is wrong."""
    written, document = tmp_path / "rows.json", tmp_path / "table.md"
    document.write_text("before\n<!-- connectors -->\nold\n<!-- end of connectors -->\nafter\n")
    done = run_program(BENCH, "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(written.read_text())
    measured = {row["way"] for row in result["connectors"]}
    assert {"process_vm_writev", "sockets", "tcp"} <= measured
    assert measured.isdisjoint(result["absent"])
    assert all(row["gb_per_s"] > 0 and row["writer_cpu_s_per_gb"] > 0 for row in result["connectors"])
    done = run_program(BENCH, "--read", written, "--readme", document)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = document.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert len([line for line in lines if "KiB |" in line]) == len(result["connectors"])


@slow_unless_changed("bench/transfer/", "bench/harness.py")
def test_the_benchmark_of_roles_runs(tmp_path: Path) -> None:
    """It fails by itself where answers differ."""
    written, document = tmp_path / "rows.json", tmp_path / "table.md"
    document.write_text("before\n<!-- roles -->\nold\n<!-- end of roles -->\nafter\n")
    done = run_program(ROLES, "--toy", "--json", written, "--readme", document)
    assert done.returncode == 0, done.stdout + done.stderr
    one, apart = json.loads(written.read_text())["rows"]
    assert apart["received_tokens"] > 0 == apart["fallbacks"] and apart["same_answers"]
    assert one["gap_p99_ms"] > 0 < apart["first_p50_ms"]
    lines = document.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and len(lines) == 8
