"""The first run on a GPU, on a CPU at toy size, so that it cannot rot; and what becomes of stages that fail."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulated_attention import emulated_kernels
from tests.engine.test_frame_staging import handing_on
from tests.fake_cuda import FakeCuda
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench"


def test_every_stage_runs(tmp_path: Path) -> None:
    written = tmp_path / "first.jsonl"
    done = run_program(BENCH / "gpu_first.py", "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert done.stdout.splitlines() == written.read_text().splitlines()
    found = {line["stage"]: line["found"] for line in lines}
    names = ["versions", "pool", "kernels", "moves", "model", "sampler", "overlap", "graphs", "tiers", "throughput"]
    names += ["profile", "formats"]
    assert list(found) == names and all(line["ok"] for line in lines)
    assert found["versions"]["missing"] == []
    assert max(found["kernels"]["cases"].values()) < 2e-2
    assert found["moves"]["moves"] == ("TritonMoves" if find_spec("triton") else "TorchMoves")
    assert found["sampler"]["same"] == found["sampler"]["draws"]
    assert found["tiers"]["loaded_bytes"] > 0


def _hangs(_: object) -> dict[str, Any]:
    time.sleep(60)
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
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import gpu_first

    monkeypatch.setitem(gpu_first.STAGES, "pool", (stage, 1.0))
    began = time.monotonic()
    line = gpu_first.run_stage("pool", gpu_first.Options("cpu", gpu_first.TOY, gpu_first.TOY, "float32"), 2.0)
    assert not line["ok"] and says in line["error"] and time.monotonic() - began < 20
    assert stage is not _crashes or "before the crash" in line["log"]
    assert stage is not _hangs or "in _hangs" in line["log"], "where it hangs"


@pytest.mark.parametrize("stage", [_finds_and_hangs, _finds_no_json])
def test_what_a_stage_has_found_is_told_though_it_fails(
    stage: Callable[[object], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import gpu_first

    monkeypatch.setitem(gpu_first.STAGES, "pool", (stage, 1.0))
    line = gpu_first.run_stage("pool", gpu_first.Options("cpu", gpu_first.TOY, gpu_first.TOY, "float32"), 2.0)
    assert not line["ok"] and line["found"] == {"first": 1}
    assert stage is _finds_and_hangs or "keys must be" in line["error"]


def test_a_stage_runs_anew_where_cuda_cannot_be_forked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    monkeypatch.setattr(sys, "argv", ["gpu_first.py", "--toy", "--only", "pool,sampler"])
    import gpu_first

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
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    monkeypatch.setattr(sys, "argv", ["gpu_first.py", "--toy", "--only", "pool,kernels", "--seconds", "0"])
    import gpu_first

    with pytest.raises(SystemExit) as ended:
        gpu_first.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 1
    assert [(line["stage"], line["error"]) for line in lines] == [
        ("pool", "no time was left"),
        ("kernels", "no time was left"),
    ]


@pytest.mark.parametrize("stage", ["pool", "model", "sampler", "overlap", "graphs", "tiers", "throughput"])
def test_stages_on_a_device_in_python(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do where there is CUDA: it must not fail on the first machine by a mistake of this file. Kernels need a
    real one."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import gpu_stages

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
        found = gpu_stages.STAGES[stage][0](gpu_stages.Options("cuda", gpu_stages.TOY, gpu_stages.TOY, "float32"))
    assert cuda.noted == []
    if stage == "model":
        assert found["same"] == [6, 6, 6] and found["warm_is_cold"]
    if stage == "pool":
        assert found["upload_copies"] == 1 and found["to_host_gb_s"] > 0
    if stage == "graphs":
        assert found["same"] == [6, 6, 6] and found["graphs"]["statistics"]["replays"] > 0
    if stage == "tiers":
        assert found["pinned"] and found["loaded_bytes"] > 0
