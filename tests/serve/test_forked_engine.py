"""An engine that is a fork of its server: it waits, begins when it is told to, and ends with its parent."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import psutil
import pytest

from tests.routing.live_router import wait_until

BEGIN = """
import os, sys, threading, time
from quire.client.process import EngineProcess, can_fork
from quire.engine.config import engine_config
def build(config, progress):
    print("built", flush=True)
    raise MemoryError
def started():
    return EngineProcess(engine_config(), build=build, waits=True)
"""


def printed(script: str) -> str:
    return subprocess.run([sys.executable, "-c", BEGIN + script], check=True, capture_output=True, text=True).stdout


def _has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("how", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_child_that_waits_ends_with_its_parent(how: str) -> None:
    script = f"child = started(); print(child.process.pid, flush=True); {how}"
    said = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True).stdout
    wait_until(partial(_has_ended, int(said)))


def test_a_child_builds_its_core_when_it_begins() -> None:
    said = printed("child = started(); print('begins', flush=True); child.begin(); child.process.join(); child.stop()")
    assert said.split() == ["begins", "built"]


def test_a_child_that_never_began_is_stopped_at_once() -> None:
    assert printed("child = started(); child.stop(deadline_s=0); print(child.process.exitcode)").split() == ["-9"]


def test_a_process_with_threads_or_torch_is_not_forked() -> None:
    script = """
print(can_fork())
import quire.serve.config
sys.modules["torch"] = None
print(can_fork())
del sys.modules["torch"]
gate = threading.Event()
thread = threading.Thread(target=gate.wait)
thread.start()
print(can_fork())
gate.set()
thread.join()
print(can_fork())
"""
    on_linux = sys.platform == "linux"
    assert printed(script).split() == [str(found) for found in (on_linux, False, False, on_linux)]
