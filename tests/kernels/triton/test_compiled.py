"""The Triton kernels compiled for three architectures: they fit, keep sums in registers, and load as they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.changes import slow_unless_changed

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton brings its assembler for Linux only")

SHARED = {80: 166_912, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that one program may have."""

MOST_SPILLED = 336
"""Bytes of a thread's stack: large tiles of sm_80, whose products have their operands in registers too."""

QUICK = ("plain-128", "latents-64", "nvfp4", "moves")
SOURCES = ("src/quire/kernels/triton/", "tests/kernels/triton/")
MOVES = {"set_table_entries", "move_pieces", "swap_in_entries", "read_rows", "write_rows"}
SLOW = (
    *("plain-64", "plain-80", "plain-256", "widths", "widest", "float32", "float32-256", "fp8", "mxfp8", "e5m2", "fp4"),
    *("trees", "latents", "latents-128", "latents-fp8", "latents-float32"),
)


@cache
def compiled(capability: int, names: tuple[str, ...]) -> list[dict[str, object]]:
    """By a process of its own: in this one, the interpreter runs kernels."""
    command = [sys.executable, "-m", "tests.kernels.triton.compiled", str(capability), *names]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=env, cwd=Path(__file__).parents[3], check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(capability: int, names: tuple[str, ...]) -> None:
    kernels = compiled(capability, names)
    assert {kernel["config"] for kernel in kernels} == set(names)
    wanted = {"attend_tasks", "merge_parts", "write_tiles"} | (MOVES if "moves" in names else set())
    assert {kernel["kernel"] for kernel in kernels} == wanted
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[capability], f"does not fit: {kernel}"
        assert kernel["stack"] <= MOST_SPILLED, f"spills: {kernel}"
        if kernel["kernel"] in MOVES:
            assert kernel["stack"] == 0 and kernel["shared"] <= 16 * 2**10, f"keeps programs from others: {kernel}"
            if kernel["ALIGNED"]:
                assert kernel["loads_16"] > 0 and kernel["stores_16"] > 0, (
                    f"copies less than 16 bytes at once: {kernel}"
                )
        if kernel["kernel"] != "attend_tasks":
            continue
        assert kernel["cp_async_16"] > 0, f"no asynchronous copies of 16 bytes: {kernel}"
        if "float32" in kernel["config"]:
            continue
        if kernel["M"] < 64:
            assert kernel["mma"] > 0, f"no tensor cores: {kernel}"
            few = kernel["stack"] <= 16  # four registers, which Triton 3.9 keeps there for two kinds
            assert few or kernel["config"] in ("nvfp4", "fp4"), f"decode spills: {kernel}"
        elif capability == 90:
            assert kernel["wgmma"] > 0, f"no wgmma: {kernel}"
        elif capability == 100:
            assert kernel["tcgen05"] > 0, f"no tcgen05: {kernel}"


@slow_unless_changed(*SOURCES)
def test_sm_90_without_a_gpu():
    check(90, QUICK)


@slow_unless_changed(*SOURCES)
def test_nothing_is_compiled_again_for_another_step():
    """A compilation takes a second or more, in which no step is launched."""
    hashes: dict[object, set[object]] = {}
    for kernel in compiled(90, ("steps",)):
        hashes.setdefault(kernel["kernel"], set()).add(kernel["hash"])
    wanted = {"attend_tasks", "merge_parts", "swap_in_entries", "read_rows", "write_rows"}
    assert {name: len(found) for name, found in hashes.items()} == dict.fromkeys(wanted, 1)


@slow_unless_changed(*SOURCES)
def test_a_launch_runs_what_triton_would():
    """Whatever its tensors begin at, and however its rows are apart."""
    (launches,) = compiled(90, ("kinds",))
    assert all(same for _, same, _ in launches), launches
    for name in ("attend_tasks", "merge_parts", "write_tiles"):
        kept = [was_kept for kernel, _, was_kept in launches if kernel == name]
        assert 2 < sum(kept) < len(kept), "some launches are of a kind that was launched before, and some are not"
    (launches,) = compiled(90, ("one-kind",))
    assert {kernel for kernel, same, _ in launches if not same} == {"attend_tasks", "merge_parts", "write_tiles"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", list(SHARED))
@pytest.mark.parametrize("names", [QUICK, SLOW[:5], SLOW[5:11], SLOW[11:]], ids=["quick", "dims", "formats", "latents"])
def test_every_kind_for_every_architecture(capability, names):
    check(capability, names)
