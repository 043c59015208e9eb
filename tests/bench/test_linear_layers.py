"""The measurements of linear layers and of forward passes at toy size, so that they cannot rot."""

from __future__ import annotations

from pathlib import Path

from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench"


def rows_of(program: str, *arguments: str) -> list[list[str]]:
    """The cells of the table that it prints, without its head. It fails by itself where ways differ."""
    done = run_program(BENCH / program, "--toy", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]


def test_alternatives_for_linear_layers_are_measured() -> None:
    rows = rows_of("linear_layers.py")
    assert len(rows) == 2 * 4 * 2  # dtypes, layers, numbers of rows
    for dtype, _, _, _, *times in rows:
        named = dict(zip(("linear", "transposed", "mkl", "packed", "packed 64"), times, strict=True))
        assert (named.pop("mkl") != "") == (dtype == "float32")
        assert all(float(each) > 0 for each in named.values())


def test_ways_of_a_forward_pass_are_measured() -> None:
    rows = rows_of("forward_pass.py")
    assert [row[:3] for row in rows] == [
        ["float32", n, m] for n, m in (("1", "1"), ("16", "1"), ("64", "1"), ("1", "256"))
    ]
    assert all(float(each.replace(",", "")) > 0 for row in rows for each in row[3:])
