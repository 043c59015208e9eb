"""Programs, servers and engines in processes forked from one that has imported them: imports take most of a start.

Each process of pytest has one fork server, that of `multiprocessing`, which loads `tests.preloaded`. Processes that a
forked program spawns, such as the engine of a server, are forked too. Tests of a start itself, of faults and of
clusters use `subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])


def run_program(
    path: Path, *arguments: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python file as a program; the result is that of `subprocess.run` with text output."""
    words = (str(path), *map(str, arguments))
    with tempfile.TemporaryFile("w+") as errors:
        program = ForkedProgram(*words, errors=errors, cwd=cwd, environment=environment)
        with program.stdout:
            output = program.stdout.read()
        status = program.wait()
        errors.seek(0)
        return subprocess.CompletedProcess(words, status, output, errors.read())


class ForkedProgram:
    """A Python file, or a module by its name, that runs as a program. The interface is a part of that of
    `subprocess.Popen`."""

    def __init__(
        self,
        name: str,
        *arguments: str,
        errors: IO[str],
        children: IO[str] | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Standard error is written to `errors`; process ids of what it spawns are written to `children`, one a line.
        The `environment` is added to that of this process."""
        reading, writing = _CONTEXT.Pipe(duplex=False)
        place = _Place(os.environ | (environment or {}), cwd or Path.cwd(), writing, _end_of(errors))
        told = None if children is None else _end_of(children)
        self._process = _CONTEXT.Process(target=_run, args=(place, told, name, arguments))
        self._process.start()
        for file in (writing, place.errors, told):
            if file is not None:
                file.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(reading.fileno()))
        reading.close()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it, unless the process has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; negative after a signal. Raises TimeoutError after so many seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"the process runs after {timeout} s")
        return self._process.exitcode


class ForkedContext(ForkServerContext):
    """Stands for the context of `multiprocessing` that spawns. Process ids are written to `children`, one a line."""

    def __init__(self, children: Connection | None = None) -> None:
        self._children = children

    def Process(  # type: ignore[override]  # noqa: N802 - the name of `multiprocessing`
        self, *, target: Callable[..., None], args: tuple[Any, ...] = (), **options: Any
    ) -> ForkServerProcess:
        """A process that is forked in place of spawned."""
        output, errors = (Connection(os.dup(number), readable=False) for number in (1, 2))
        place = _Place(dict(os.environ), Path.cwd(), output, errors)
        return _CONTEXT.Process(target=_run_spawned, args=(place, self._children, target, *args), **options)


def forked_cpu_s() -> float:
    """Seconds of CPU of the fork server of this process and of all its processes that have ended."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class _Place:
    """What a process gets from its parent."""

    def __init__(self, environment: Mapping[str, str], folder: Path, output: Connection, errors: Connection) -> None:
        self.environment, self.folder, self.output, self.errors = dict(environment), folder, output, errors

    def take(self) -> None:
        """Give it to this process. The connections are closed."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        for number, file in ((1, self.output), (2, self.errors)):
            os.dup2(file.fileno(), number)
            file.close()
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]  # there is one


def _end_of(file: IO[str]) -> Connection:
    return Connection(os.dup(file.fileno()), readable=False)


def _run_spawned(place: _Place, children: Connection | None, target: Callable[..., None], *arguments: Any) -> None:
    if children is not None:
        os.write(children.fileno(), f"{os.getpid()}\n".encode())
        children.close()
    place.take()
    target(*arguments)


def _run(place: _Place, children: Connection | None, name: str, arguments: tuple[str, ...]) -> None:
    """Run a file or a module in this process, and end the process as an interpreter ends."""
    assert "quire.engine.core" in sys.modules, "the fork server has not loaded what it should"
    place.take()
    spawns, forks = multiprocessing.get_context, ForkedContext(children)
    multiprocessing.get_context = lambda method=None: forks if method == "spawn" else spawns(method)  # type: ignore[assignment,return-value]
    sys.argv = [name, *arguments]
    status = 0
    try:
        if name.endswith(".py"):
            sys.path[:1] = [str(Path(name).parent), str(ROOT)]
            runpy.run_path(name, run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
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
