"""`bench/storage/store.py`: rates of a directory and of a server, beside the disk's; nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.storage.store import app
from typer.testing import CliRunner

from tests.cli.conftest import Run
from tests.cli.test_store import WIDE, check_passwords, read
from tests.programs import run_program

PROGRAM = Path(__file__).parents[2] / "bench" / "storage" / "store.py"


@pytest.fixture
def run() -> Run:
    """Runs the program with arguments, in this process."""
    return lambda *words, **options: CliRunner().invoke(app, [str(word) for word in words], **options)


def test_bench(run: Run, tmp_path: Path) -> None:
    done = run(tmp_path, "--sizes", "8KiB,64KiB", "--total", "1MiB", "--batch", 8, "--json")
    assert done.exit_code == 0, done.output
    rows = read(done.stdout)["rows"]
    assert [(row["how"], row["record_bytes"]) for row in rows if row["how"] == "buffered"] == [
        ("buffered", 8192),
        ("buffered", 65536),
    ]
    for row in rows:
        assert (
            row["store"]["put_gb_per_second"] > 0 and row["disk"]["get_gb_per_second"] > 0 and row["ratio"]["get"] > 0
        )
    assert list(tmp_path.iterdir()) == [], "something was left behind"


def test_bench_for_people(run: Run, tmp_path: Path) -> None:
    done = run(tmp_path, "--sizes", "8KiB", "--total", "64KiB", env=WIDE)
    assert done.exit_code == 0 and "put GB/s" in done.stdout and "8.00 KiB" in done.stdout


def test_bench_makes_no_directory(run: Run, tmp_path: Path) -> None:
    """A name that was mistyped is not a new directory."""
    (tmp_path / "file").write_text("x")
    for name, said in (("nowhere", "is not there"), ("file", "is not a directory")):
        done = run(tmp_path / name, "--sizes", "8KiB", "--total", "64KiB", env=WIDE)
        assert done.exit_code == 2 and said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("as_json", [True, False])
def test_passwords_are_not_shown(run: Run, as_json: bool) -> None:
    flags = ["--sizes", "4KiB", "--total", "8KiB", *(["--json"] if as_json else [])]
    check_passwords(lambda url: run(url, *flags), as_json=as_json)


def test_segments_are_compared(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    done = run_program(PROGRAM.with_name("segments.py"), "--toy", "--json", written)
    assert done.returncode == 0, done.stderr
    rows = json.loads(written.read_text())["rows"]
    assert len(rows) == 9 and all(0 < row["coldest"] <= row["records"] + 0.05 for row in rows)
