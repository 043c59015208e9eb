"""The measurements of linear layers, of forward passes and of draws at toy size, so that they cannot rot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.kernels.native.library import native
from quire.models.linear import native_on_cpu
from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "kernels"


def rows_of(program: str, environment: dict[str, str] | None = None) -> list[list[str]]:
    """The cells of the table that it prints, without its head. It fails by itself where ways differ."""
    done = run_program(BENCH / program, "--toy", environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]


@slow_unless_changed("bench/kernels/", "bench/harness.py")
@pytest.mark.parametrize("narrowest", [False, True])
def test_alternatives_for_linear_layers_are_measured(narrowest: bool) -> None:
    """On this CPU, and as on one without products of bfloat16."""
    rows = rows_of("linear_layers.py", {"ONEDNN_MAX_CPU_ISA": "AVX2"} if narrowest else None)
    assert len(rows) == 2 * 4 * 2  # dtypes, layers, numbers of rows
    packs = {"float32": True, "bfloat16": native_on_cpu(torch.bfloat16) and not narrowest}
    for dtype, _, _, _, *times in rows:
        named = dict(zip(("linear", "transposed", "mkl", "packed", "packed 64", "native"), times, strict=True))
        measured = {"linear", "transposed"} | ({"mkl"} if dtype == "float32" else set())
        measured |= {"packed", "packed 64"} if packs[dtype] else set()
        measured |= {"native"} if packs[dtype] and native().library is not None else set()
        assert {name for name, each in named.items() if each} == measured
        assert all(float(named[name]) > 0 for name in measured)


@slow_unless_changed("bench/kernels/", "bench/harness.py")
def test_ways_of_a_forward_pass_are_measured() -> None:
    rows = rows_of("forward_pass.py")
    assert [row[:3] for row in rows] == [
        ["float32", n, m] for n, m in (("1", "1"), ("16", "1"), ("64", "1"), ("1", "100"), ("16", "16"), ("1", "256"))
    ]
    assert all(float(each.replace(",", "")) > 0 for row in rows for each in row[3:])


@slow_unless_changed("bench/kernels/", "bench/harness.py", "bench/peers/draws_worker.py")
def test_ways_to_draw_are_measured() -> None:
    rows = rows_of("draws.py")
    assert [row[:4] for row in rows] == [
        ["500", count, "flat", kind]
        for count in ("1", "16")
        for kind in ("greedy", "temperature", "top-p", "top-k", "top-k, top-p")
    ]
    assert all(float(each.replace(",", "")) > 0 for row in rows for each in row[4:])
