"""The first run on a GPU, on a CPU at toy size, so that it cannot rot; and what becomes of stages that fail."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import waits
from tests.changes import slow_unless_changed
from tests.emulated_attention import emulated_kernels
from tests.engine import test_cuda_memory
from tests.engine.test_frame_staging import handing_on
from tests.fake_cuda import FakeCuda
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench"
LONG = slow_unless_changed(
    "bench/gpu_", "bench/kernels/", "src/quire/engine/", "src/quire/kernels/", "src/quire/models/"
)


@LONG
def test_every_stage_runs(tmp_path: Path) -> None:
    written = tmp_path / "first.jsonl"
    done = run_program(BENCH / "gpu_first.py", "--toy", "--stages", "all", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    all_lines = [json.loads(line) for line in written.read_text().splitlines()]
    lines = [line for line in all_lines if "partial" not in line]
    assert [json.loads(line) for line in done.stdout.splitlines()] == lines
    assert {line["stage"] for line in all_lines if "partial" in line} >= {"kernels", "model", "overlap", "graphs"}
    found = {line["stage"]: line["found"] for line in lines}
    names = ["versions", "pool", "kernels", "launches", "model", "sampler", "moves", "overlap", "graphs", "tiers"]
    names += ["throughput", "formats", "mapped", "profile"]
    assert list(found) == names and all(line["ok"] for line in lines)
    assert found["versions"]["missing"] == []
    assert max(found["kernels"]["cases"].values()) < 2e-2
    assert found["moves"]["moves"] == ("TritonMoves" if find_spec("triton") else "Moves")
    assert found["sampler"]["same"] == found["sampler"]["draws"]
    assert found["tiers"]["loaded_bytes"] > 0
    if find_spec("triton"):
        assert len(found["launches"]["us_per_layer"]) == 4 and min(found["launches"]["us_per_layer"].values()) > 0


def test_first_stages_end_within_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each takes all of its time: a call on a machine with a GPU has ten minutes, and what is killed some more
    seconds."""
    from bench import gpu_first

    assert sum(limit for _, limit in gpu_first.STAGES.values()) <= 540
    assert sum(limit for _, limit in gpu_first.REST.values()) + gpu_first.STAGES["versions"][1] <= 540
    assert not set(gpu_first.STAGES) & set(gpu_first.REST)


def _tells_on(options: Any) -> dict[str, Any]:
    for number in itertools.count():
        options.tell({"numbers": list(range(number % 3000))})
    return {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_leaves_whole_lines(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was found until then; SIGTERM is answered by a line, and ends the stage too."""
    monkeypatch.setattr(sys, "argv", ["gpu_first.py", "--toy", "--stages", "pool,sampler", "--json", "lines"])
    monkeypatch.chdir(tmp_path)
    from bench import gpu_first

    monkeypatch.setitem(gpu_first.ALL, "pool", (_tells_on, 60.0))
    written, group = tmp_path / "lines", tmp_path / "stage"
    real = os.setsid
    monkeypatch.setattr(os, "setsid", lambda: (real(), group.write_text(str(os.getpid()))))
    child = os.fork()
    if not child:
        try:
            gpu_first.main()
        except SystemExit as ended:
            os._exit(int(str(ended.code)))
        finally:
            os._exit(99)
    try:
        until = time.monotonic() + 60
        while not (written.exists() and written.stat().st_size > 100_000):
            assert time.monotonic() < until
            time.sleep(0.001)
    finally:
        os.kill(child, number)
    _, status = os.waitpid(child, 0)
    if number == signal.SIGKILL:
        os.killpg(int(group.read_text()), signal.SIGKILL)  # its stage goes on
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert written.read_text().endswith("\n") and len(lines) > 10
    last = lines[-1]
    assert last["stage"] == "pool" and "numbers" in last["found"]
    if number == signal.SIGTERM:
        assert os.waitstatus_to_exitcode(status) == 143
        assert last["error"] == "ended by SIGTERM" and "partial" not in last
        with pytest.raises(ProcessLookupError):
            os.kill(int(group.read_text()), 0)
    else:
        assert os.waitstatus_to_exitcode(status) == -9 and last["partial"]


def _hangs(_: object) -> dict[str, Any]:
    time.sleep(1e6)
    return {}


def _crashes(_: object) -> dict[str, Any]:
    os.write(1, b"before the crash")
    os.kill(os.getpid(), signal.SIGKILL)  # an abort would print the stacks of pytest
    return {}


def _fails(_: object) -> dict[str, Any]:
    raise MemoryError("no room")


def _finds_and_hangs(options: Any) -> dict[str, Any]:
    options.tell({"first": 1})
    return _hangs(options)


def _finds_no_json(options: Any) -> dict[str, Any]:
    options.tell({"first": 1})
    return {(1, 2): 3}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("stage", "says"), [(_hangs, "no answer in 2 s"), (_crashes, "ended with status 9"), (_fails, "no room")]
)
def test_a_stage_that_fails_ends_alone(
    stage: Callable[[object], dict[str, Any]], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import gpu_first

    monkeypatch.setitem(gpu_first.ALL, "pool", (stage, 1.0))
    limit_s = 2.0 if stage is _hangs else waits.SOON_S
    line = gpu_first.run_stage("pool", gpu_first.Options("cpu", gpu_first.TOY, gpu_first.TOY, "float32"), limit_s)
    assert not line["ok"] and says in line["error"]
    assert stage is not _crashes or "before the crash" in line["log"]
    assert stage is not _hangs or "in _hangs" in line["log"], "where it hangs"


@pytest.mark.parametrize("stage", [_finds_and_hangs, _finds_no_json])
def test_what_a_stage_has_found_is_told_though_it_fails(
    stage: Callable[[object], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import gpu_first

    monkeypatch.setitem(gpu_first.ALL, "pool", (stage, 1.0))
    limit_s = 5.0 if stage is _finds_and_hangs else waits.SOON_S
    line = gpu_first.run_stage("pool", gpu_first.Options("cpu", gpu_first.TOY, gpu_first.TOY, "float32"), limit_s)
    assert not line["ok"] and line["found"] == {"first": 1}
    assert stage is _finds_and_hangs or "keys must be" in line["error"]


def test_a_stage_runs_anew_where_cuda_cannot_be_forked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_first.py", "--toy", "--stages", "pool,sampler"])
    from bench import gpu_first

    def forked(name: str, *_: object) -> dict[str, Any]:
        return {"stage": name, "ok": name != "pool", "error": "CUDA error: initialization error" * (name == "pool")}

    monkeypatch.setattr(gpu_first, "run_stage", forked)
    monkeypatch.setattr(gpu_first, "run_anew", lambda name, given, limit: {"stage": name, "ok": True, "anew": given})
    with pytest.raises(SystemExit) as ended:
        gpu_first.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 0
    assert [(line["stage"], line.get("anew")) for line in lines] == [("pool", ["--toy"]), ("sampler", None)]


def test_time_that_is_up_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_first.py", "--toy", "--stages", "pool,kernels", "--seconds", "0"])
    from bench import gpu_first

    with pytest.raises(SystemExit) as ended:
        gpu_first.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 1
    assert [(line["stage"], line["error"]) for line in lines] == [
        ("pool", "no time was left"),
        ("kernels", "no time was left"),
    ]


@LONG
@pytest.mark.parametrize("stage", ["pool", "model", "sampler", "overlap", "graphs", "tiers", "throughput"])
def test_stages_on_a_device_in_python(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do where there is CUDA: it must not fail on the first machine by a mistake of this file. Kernels need a
    real one."""
    from bench import gpu_stages
    from quire.engine import config

    cuda, made = FakeCuda(), config.engine_config

    def on_torch(**settings: Any) -> Any:
        word = "auto" if settings["device"] == "cpu" or stage == "graphs" else "torch"
        return made(**settings, attention_backend=word)

    monkeypatch.setattr(config, "engine_config", on_torch)
    emulated = emulated_kernels() if stage == "graphs" else nullcontext()
    with cuda.installed(), handing_on(cuda), emulated:
        watching = {"error": True, "default": False, 0: False}
        debug = "set_sync_debug_mode"
        monkeypatch.setattr(torch.cuda, debug, lambda mode: setattr(cuda._watching, "on", watching[mode]))
        found = gpu_stages.ALL[stage][0](gpu_stages.Options("cuda", gpu_stages.TOY, gpu_stages.TOY, "float32"))
    assert cuda.noted == []
    if stage == "model":
        assert found["same"] == [6, 6, 6] and found["warm_is_cold"]
    if stage == "pool":
        assert found["upload_copies"] == 1 and found["to_host_gb_s"] > 0
    if stage == "graphs":
        assert found["same"] == [6, 6, 6] and found["graphs"]["statistics"]["replays"] > 0
    if stage == "tiers":
        assert found["pinned"] and found["loaded_bytes"] > 0


@pytest.fixture
def wide() -> Any:
    """The toy with the pages of a larger model: 16 KiB for each token, as at the size of a GPU."""
    from bench import gpu_stages

    toy = replace(gpu_stages.TOY, layers=16, hidden=128, heads=4, kv_heads=4, intermediate=32)
    sizes = replace(toy, prompt=640, new=2, many=100)
    return gpu_stages.Options("cpu", sizes, sizes, "float32")


def test_many_requests_run_together(wide: Any) -> None:
    from bench import gpu_stages

    found = gpu_stages._host_of_many(wide, gpu_stages.model_of(wide.small, "float32", "cpu"))
    assert found["requests"] == found["largest_step"] == 100


def test_a_starved_engine_has_no_room_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import gpu_stages

    made, cores = gpu_stages.engine_of, []

    def engine_of(*given: Any, **settings: Any) -> Any:
        cores.append(made(*given, **settings))
        return cores[-1]

    monkeypatch.setattr(gpu_stages, "engine_of", engine_of)
    sizes = replace(gpu_stages.TOY, requests=5)
    assert gpu_stages._tiered_engine(gpu_stages.Options("cpu", sizes, sizes, "float32"))["loaded_bytes"] > 0
    room = [core.plan.num_pages * gpu_stages.PAGE_SIZE for core in cores]
    assert room[1] < sizes.requests * (sizes.prompt + sizes.new) < room[0]


@LONG
def test_mapped_memory_has_room_at_each_size(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in of CUDA's driver."""
    from bench import gpu_stages
    from quire.engine import tiers
    from quire.engine.device import cuda_memory

    gpu = test_cuda_memory.StandIn(test_cuda_memory.library())
    gpu.has(1 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gpu.free, 1 << 30))
    for module in (tiers, cuda_memory):
        monkeypatch.setattr(module, "cuda_backing", gpu.backing)
    assert "refused" not in gpu_stages.mapped(wide)
