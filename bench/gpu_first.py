"""The first run on a machine with a GPU: stages of rising risk, so that ten minutes there never end empty-handed.

    python bench/gpu_first.py --json first.jsonl         on a machine with a GPU, at most ten minutes
    python bench/gpu_first.py --toy                      the same code on a CPU in seconds, for CI
    python bench/gpu_first.py --only kernels,sampler     some stages

Each stage is a process of its own with its own time limit: one that hangs, crashes or breaks the device ends alone.
Each prints one line of JSON as soon as it ends, also to `--json`: its name, `ok`, seconds, and what it found or how it
failed, with what it had found until then. The exit status is 1 if a stage failed. Nothing is downloaded; models have
random weights.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from gpu_stages import LLAMA_8B, SMALL, STAGES, TOY, Found, Options  # noqa: E402

TAIL = 1500
"""Characters of an error that are printed."""
KILLED_S = 10.0
"""For a process that was killed to end: one that waits in a driver may never."""
NO_FORK = ("re-initialize CUDA", "initialization error")
"""CUDA says this in a process that was forked after another use of it."""


# -- processes


def run_stage(name: str, options: Options, limit_s: float) -> Found:
    """One stage, in a process that is forked from this one: what is imported is imported once. This process never uses
    the device."""
    stage, _ = STAGES[name]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer, log, told = (Path(folder) / name for name in ("answer", "log", "told"))
        child = os.fork()
        if not child:
            _work(stage, replace(options, told=told), answer, log, limit_s)
        ended, status = _ended(child, limit_s)
        if not ended:
            os.killpg(child, signal.SIGKILL)
            _ended(child, KILLED_S)
        seconds = round(time.perf_counter() - began, 2)
        said = json.loads(answer.read_text()) if answer.exists() else None
        before = {"found": json.loads(told.read_text())} if told.exists() else {}
        if said is None:
            why = f"no answer in {limit_s:g} s" if not ended else f"ended with status {status}"
            said = {"ok": False, "error": why, "log": _last(log.read_text(errors="replace")) if log.exists() else ""}
    return {"stage": name, "seconds": seconds, **before, **said}


def _last(log: str) -> str:
    """The end of a log, or the innermost calls of a stage that hangs (`faulthandler`)."""
    hangs = log.rfind("Timeout (")
    return log[-TAIL:] if hangs < 0 else log[hangs : hangs + TAIL]


def _ended(child: int, limit_s: float) -> tuple[bool, int]:
    """Whether a process ends until then, and its status."""
    until = time.perf_counter() + limit_s
    while time.perf_counter() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found == child:
            return True, status
        time.sleep(0.01)
    return False, 0


def _work(stage: Callable[[Options], Found], options: Options, answer: Path, log: Path, limit_s: float) -> None:
    """In the child: the answer is a file that is there when it is whole."""
    try:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.dump_traceback_later(0.75 * limit_s, file=2)  # where it hangs, if it does
        try:
            said = json.dumps({"ok": True, "found": stage(options)}, default=str)
        except BaseException as error:  # whatever it is, it is told
            where = "".join(traceback.format_exception(error))[-TAIL:]
            said = json.dumps({"ok": False, "error": f"{type(error).__name__}: {error}"[:TAIL], "log": where})
        part = answer.with_suffix(".part")
        part.write_text(said)
        part.rename(answer)
    finally:
        os._exit(0)  # never on in what the parent does


def run_anew(name: str, arguments: Sequence[str], limit_s: float) -> Found:
    """A stage in a new interpreter. The first one is: an import may crash, and this process imports the same next."""
    began = time.perf_counter()
    command = [sys.executable, __file__, *arguments, "--stage", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        said: Found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        if not said:
            said = {"ok": False, "error": f"ended with status {done.returncode}", "log": done.stderr[-TAIL:]}
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        said = {"ok": False, "error": f"{type(error).__name__}: {error}"[:TAIL]}
    return {"stage": name, "seconds": round(time.perf_counter() - began, 2), **said}


def options_of(parsed: argparse.Namespace) -> Options:
    """Sizes by device: those of an 8B model on a GPU, small ones elsewhere."""
    if parsed.toy:
        return Options(parsed.device or "cpu", TOY, TOY, "float32")
    device = parsed.device or "cuda"
    is_cuda = device.startswith("cuda")
    return Options(device, SMALL, LLAMA_8B if is_cuda else SMALL, "bfloat16" if is_cuda else "float32")


def main() -> None:
    """Run the stages, and print a line for each."""
    parser = argparse.ArgumentParser(description="First run on a machine with a GPU.")
    parser.add_argument("--device", default="", help="cuda, or cpu; cuda by default, cpu with --toy")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--only", default="", help="stages, with commas")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument("--seconds", type=float, default=570.0, help="of all stages together")
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    options = options_of(parsed)
    if parsed.stage:
        print(json.dumps({"ok": True, "found": STAGES[parsed.stage][0](options)}, default=str))
        return
    chosen = parsed.only.split(",") if parsed.only else list(STAGES)
    if unknown := set(chosen) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    until, failed = time.perf_counter() + parsed.seconds, False
    given = [*(["--toy"] if parsed.toy else []), *(["--device", parsed.device] if parsed.device else [])]
    for name in chosen:
        limit = min(STAGES[name][1], until - time.perf_counter())
        if limit <= 1:
            line: Found = {"stage": name, "ok": False, "error": "no time was left"}
        elif name == "versions":
            line = run_anew(name, given, limit)
        else:
            line = run_stage(name, options, limit)
            if any(words in line.get("error", "") for words in NO_FORK):
                line = run_anew(name, given, min(STAGES[name][1], max(until - time.perf_counter(), 1.0)))
        failed |= not line["ok"]
        text = json.dumps(line)
        print(text, flush=True)
        if parsed.json is not None:
            with parsed.json.open("a") as file:
                file.write(text + "\n")
        if name == "versions" and line["ok"]:
            _import()
    sys.exit(1 if failed else 0)


def _import() -> None:
    """What stages use, before they are forked. Nothing here may start CUDA or threads; a library that asks whether
    there is a GPU must be answered without starting it."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch
    import transformers.models.llama  # noqa: F401

    import quire.engine.core  # noqa: F401

    assert not torch.cuda.is_initialized()


if __name__ == "__main__":
    main()
