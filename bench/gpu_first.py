"""The first run on a machine with a GPU: stages of rising risk, so that ten minutes there never end empty-handed.

    python bench/gpu_first.py --json first.jsonl         on a machine with a GPU, at most ten minutes
    python bench/gpu_first.py --stages rest              what these ten minutes have no time for
    python bench/gpu_first.py --stages kernels,sampler   some stages
    python bench/gpu_first.py --toy --stages all         the same code on a CPU in seconds, for CI

Each stage is a process of its own with its own time limit: one that hangs, crashes or breaks the device ends alone.
Each prints one line of JSON as soon as it ends, also to `--json`: its name, `ok`, seconds, and what it found or how it
failed, with what it had found until then. What a stage has found so far is in that file too, in lines marked
`partial`, so that nothing is lost if this program is killed; ended by SIGTERM it says so in a line. The exit status is
1 if a stage failed. Nothing is downloaded; models have random weights.
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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from bench.gpu_stages import ALL, LLAMA_8B, REST, SMALL, STAGES, TOY, Found, Options, append  # noqa: E402

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
    stage, _ = ALL[name]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer, log, told = (Path(folder) / name for name in ("answer", "log", "told"))
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _work(stage, replace(options, told=told, name=name), answer, log, limit_s)
        ended, status, why = False, 0, f"no answer in {limit_s:g} s"
        try:
            ended, status = _ended(child, limit_s)
        except Terminated as error:
            why = str(error)
        if not ended:
            _kill(child)
        seconds = round(time.perf_counter() - began, 2)
        said = json.loads(answer.read_text()) if answer.exists() else None
        if said is None:
            why = f"ended with status {status}" if ended else why
            said = {"ok": False, "error": why, "log": _last(log.read_text(errors="replace")) if log.exists() else ""}
        return {"stage": name, "seconds": seconds, **_before(told), **said}


class Terminated(Exception):
    """This process was asked to end."""


def _terminate(number: int, _: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    raise Terminated(f"ended by {signal.Signals(number).name}")


def _before(told: Path) -> Found:
    """What a stage has found until now."""
    return {"found": json.loads(told.read_text())} if told.exists() else {}


def _kill(child: int) -> None:
    """A child, and what it has started; it may not have become the leader of its group yet."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    _ended(child, KILLED_S)


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
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        command = [sys.executable, __file__, *arguments, "--one", name, "--told", str(told)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
            said: Found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
            if not said:
                said = {"ok": False, "error": f"ended with status {done.returncode}", "log": done.stderr[-TAIL:]}
        except (subprocess.TimeoutExpired, IndexError, ValueError, Terminated) as error:
            said = {"ok": False, "error": f"{type(error).__name__}: {error}"[:TAIL]}
        return {"stage": name, "seconds": round(time.perf_counter() - began, 2), **_before(told), **said}


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
    parser.add_argument("--stages", default="first", help="first, rest, all, or names with commas")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument("--seconds", type=float, default=560.0, help="of all stages together")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    options = replace(options_of(parsed), lines=parsed.json)
    if parsed.one:
        found = ALL[parsed.one][0](replace(options, told=parsed.told, name=parsed.one))
        print(json.dumps({"ok": True, "found": found}, default=str))
        return
    groups = {"first": list(STAGES), "rest": ["versions", *REST], "all": list(ALL)}
    chosen = groups.get(parsed.stages) or parsed.stages.split(",")
    if unknown := set(chosen) - set(ALL):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, _terminate)
    given = [*(["--toy"] if parsed.toy else []), *(["--device", parsed.device] if parsed.device else [])]
    given += ["--json", str(parsed.json)] if parsed.json is not None else []
    sys.exit(_run(chosen, options, given, time.perf_counter() + parsed.seconds))


def _run(chosen: Sequence[str], options: Options, given: Sequence[str], until: float) -> int:
    """The exit status of these stages. `given` are the arguments of a stage in a new interpreter."""
    failed = False
    for name in chosen:
        limit = min(ALL[name][1], until - time.perf_counter())
        if limit <= 1:
            line: Found = {"stage": name, "ok": False, "error": "no time was left"}
        elif name == "versions":
            line = run_anew(name, given, limit)
        else:
            line = run_stage(name, options, limit)
            if any(words in line.get("error", "") for words in NO_FORK):
                line = run_anew(name, given, min(ALL[name][1], max(until - time.perf_counter(), 1.0)))
        failed |= not line["ok"]
        text = json.dumps(line)
        print(text, flush=True)
        if options.lines is not None:
            append(options.lines, text)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            return 128 + signal.SIGTERM
        if name == "versions" and line["ok"]:
            _import()
    return 1 if failed else 0


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
