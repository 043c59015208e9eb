"""Programs of the repository, run in processes forked from one that has imported torch, transformers and the engine.

That import costs as much as most of these programs do. Programs whose start is under test use `subprocess`.

    python -m tests.programs                    the process that forks; `ForkServer` runs it
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.forked import ForkServer, Say, serve

ROOT = Path(__file__).parents[1]


def run_program(
    path: Path, *arguments: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python file as a program; the result is that of `subprocess.run` with text output."""
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "arguments": [str(path), *map(str, arguments)],
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(environment or {}),
            "folder": folder,
        }
        ended = _server().run(job)
        output, errors = ((Path(folder) / name).read_text() for name in ("output", "errors"))
    status = os.waitstatus_to_exitcode(ended.status)
    return subprocess.CompletedProcess(job["arguments"], status, output, errors)


@cache
def _server() -> ForkServer:
    server = ForkServer("tests.programs")
    atexit.register(server.close)
    return server


def _work(job: dict[str, Any], say: Say) -> None:
    """Run one program in this process, and end the process as an interpreter ends."""
    folder = Path(job["folder"])
    for number, name in ((1, "output"), (2, "errors")):
        with open(folder / name, "wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    sys.argv = job["arguments"]
    sys.path[:1] = [str(Path(sys.argv[0]).parent), str(ROOT)]
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    from quire.engine.lean_imports import without_compiler

    without_compiler("auto")

    serve(_work)
