"""Processes that are forked, work for a while, and are killed or end well.

A program of such workers calls `serve(work)`: it is told a job of JSON a line, and each job is a process of its own,
whose every word is a line of JSON. `ForkServer` runs the program.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HANGS_S = 280.0
"""No worker takes so long."""

Say = Callable[[Any], None]

_cpu_s = [0.0]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a worker ended: by SIGKILL, with a status, or not at all (`hung`, and was killed for that). `said` is what it
    had to say until then. `cpu_s` is what it took."""

    killed: bool
    status: int
    hung: bool
    said: list[Any]
    cpu_s: float


class ForkServer:
    """Starts workers, one after the other."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, job: dict[str, Any]) -> Ended:
        """Have a job done."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        ended = Ended(**json.loads(self._process.stdout.readline()))
        _cpu_s[0] += ended.cpu_s
        return ended

    def close(self) -> None:
        self._process.communicate()


def workers_cpu_s() -> float:
    """Seconds of CPU of all workers of this process that have ended."""
    return _cpu_s[0]


def die() -> None:
    """SIGKILL, now: nothing runs after it, in any thread."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_in(say: Say, seconds: float) -> None:
    """This worker goes on, and gets SIGKILL in so many seconds, whatever it is at."""
    say({"kill in": seconds})


def serve(work: Callable[[dict[str, Any], Say], None]) -> None:
    """Do jobs until the input ends."""
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            status = 1
            try:
                work(json.loads(line), partial(_tell, writing))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(writing)
        said, hung = _listen(reading, child)
        _, status, used = os.wait4(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        cpu_s = used.ru_utime + used.ru_stime
        print(json.dumps({"killed": killed, "status": status, "hung": hung, "said": said, "cpu_s": cpu_s}), flush=True)


def _tell(pipe: int, word: Any) -> None:
    os.write(pipe, json.dumps(word).encode() + b"\n")


def _listen(pipe: int, child: int) -> tuple[list[Any], bool]:
    """All that a worker says until it ends; it is killed when its time has come."""
    said: list[Any] = []
    rest = b""
    kill_at, hangs_at = math.inf, time.monotonic() + HANGS_S
    while True:
        now = time.monotonic()
        if now >= min(kill_at, hangs_at):
            os.kill(child, signal.SIGKILL)
            kill_at = math.inf
        ready, _, _ = select.select([pipe], [], [], max(0.0, min(kill_at - now, 1.0)))
        if not ready:
            continue
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        *lines, rest = (rest + part).split(b"\n")
        for word in map(json.loads, lines):
            said.append(word)
            if isinstance(word, dict) and "kill in" in word:
                kill_at = min(kill_at, time.monotonic() + word["kill in"])
    os.close(pipe)
    return said, time.monotonic() >= hangs_at
