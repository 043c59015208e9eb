"""A server and its engine as processes forked from one that has imported both: imports take most CPU of a start.

Each process of pytest has one fork server (that of `multiprocessing`), which loads `tests.serve.preloaded`. Tests of a
start itself, of faults and of clusters start real processes.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.serve.preloaded"])


class ForkedProgram:
    """A Python module that runs as a program. The interface is a part of that of `subprocess.Popen`."""

    def __init__(self, module: str, *arguments: str, errors: IO[str], children: IO[str]) -> None:
        """Standard error is written to `errors`; process ids of engines that it starts are written to `children`, one
        a line."""
        reading, writing = _CONTEXT.Pipe(duplex=False)
        files = (writing, *(Connection(os.dup(file.fileno()), readable=False) for file in (errors, children)))
        given = (dict(os.environ), Path.cwd(), module, arguments, *files)
        self._process = _CONTEXT.Process(target=_run, args=given)
        self._process.start()
        for file in files:
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


def forked_cpu_s() -> float:
    """Seconds of CPU of the fork server of this process and of all its processes that have ended."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _run(
    environment: Mapping[str, str],
    folder: Path,
    module: str,
    arguments: tuple[str, ...],
    output: Connection,
    errors: Connection,
    children: Connection,
) -> None:
    """Run the module in this process, and end the process as an interpreter ends."""
    assert "quire.engine.core" in sys.modules, "the fork server has not loaded what it should"
    _take_place(environment, folder, output, errors)
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]  # engines: of the same one
    multiprocessing.get_context = lambda method=None: _Engines(children)  # type: ignore[assignment,return-value]
    sys.argv = [module, *arguments]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Engines:
    """Stands for the context of a server that spawns its engine."""

    def __init__(self, children: Connection) -> None:
        self._children = children

    def Process(  # noqa: N802 - the name of `multiprocessing`
        self, *, target: Callable[..., None], args: tuple[Any, ...], **options: Any
    ) -> ForkServerProcess:
        """A process that is forked in place of spawned."""
        files = (Connection(os.dup(number), readable=False) for number in (1, 2))
        given = (dict(os.environ), Path.cwd(), *files, self._children, target, *args)
        return _CONTEXT.Process(target=_run_engine, args=given, **options)


def _run_engine(
    environment: Mapping[str, str],
    folder: Path,
    output: Connection,
    errors: Connection,
    children: Connection,
    target: Callable[..., None],
    *arguments: Any,
) -> None:
    os.write(children.fileno(), f"{os.getpid()}\n".encode())
    children.close()
    _take_place(environment, folder, output, errors)
    target(*arguments)


def _take_place(environment: Mapping[str, str], folder: Path, output: Connection, errors: Connection) -> None:
    """Give this process what a process gets from its parent. The connections are closed."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in ((1, output), (2, errors)):
        os.dup2(file.fileno(), number)
        file.close()
