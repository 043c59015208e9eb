"""One run after the other: load, a signal at its moment, and then all that must hold."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

import psutil

from tests.faults.cases import SIGNALS, Case, case
from tests.faults.clients import NUM_PROMPTS, Load, wrong
from tests.faults.targets import RECOVERS_S, Fault, Target, answers, left_in_shared_memory

_LEFT_S = 15.0


class Matrix:
    """Runs of a seed, the last of each `cluster_every` of a cluster. Targets live from one run to the next, and end in
    `__exit__`. `faults` is what did not hold."""

    def __init__(self, seed: int, *, cluster_every: int = 0) -> None:
        self.faults: list[str] = []
        self.num_runs = 0
        self._seed = seed
        self._cluster_every = cluster_every
        self._told: Counter[str] = Counter()
        self._cases: Counter[str] = Counter()
        self._targets: dict[str, Target] = {}
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="quire-faults-"))
        self._shared = set(left_in_shared_memory())
        self._expected = answers()
        return self

    def __exit__(self, *_: object) -> None:
        for target in self._targets.values():
            with self._noting(f"the end of {target.name}", target):
                target.down()
        left = set(left_in_shared_memory()) - self._shared
        until = time.monotonic() + _LEFT_S
        while left and time.monotonic() < until:
            time.sleep(0.5)
            left &= set(left_in_shared_memory())  # what others were about to map or remove is not left
        if left:
            self.faults.append(f"left in shared memory: {sorted(map(str, left))}")
        shutil.rmtree(self._folder)

    def run(self, number: int) -> None:
        """One run; what does not hold is noted, and its servers are replaced."""
        this = case(self._seed, number, cluster_every=self._cluster_every)
        target = self._targets.setdefault(this.target, Target(this.target, self._folder / this.target))
        with self._noting(str(this), target):
            self._run(this, target)
        self.num_runs += 1
        self._cases.update((this.process, this.signal, f"at {this.moment}", f"tier {this.tier}", f"load {this.load}"))

    @contextlib.contextmanager
    def _noting(self, what: str, target: Target) -> Any:
        try:
            yield
        except (AssertionError, OSError, ValueError, psutil.Error) as error:
            self.faults.append(f"{what}\n{type(error).__name__}: {error}\n{target.log()}")
            target.drop()

    def _run(self, this: Case, target: Target) -> None:
        draw = this.draw()
        live = target.up()
        load = Load(live.port, this.load, draw)
        family = target.family()
        if this.moment == "restart":
            before = target.process("engine")
            before.kill()
            load.start()
            victim = target.next_engine(before.pid)
            time.sleep(draw.uniform(0, 2.0))
        else:
            victim = target.process(this.process)
            if this.moment != "idle":
                load.start()
            if this.moment == "begin":
                load.sent.wait(RECOVERS_S)
                time.sleep(draw.uniform(0, 0.03))
            elif this.moment == "decode":
                load.token.wait(RECOVERS_S)
            elif this.moment == "end":
                load.join()
        family = list({each.pid: each for each in (*family, *target.family())}.values())
        going_on = _strike(victim, this.signal, draw)
        if this.moment == "idle":
            load.start()
        load.join()
        going_on.join()
        for client in load.clients:
            self._told[client.told.kind] += 1
            may_close, behind_router = this.ends_the_front, this.target == "cluster"
            expected = self._expected[client.number]
            if found := wrong(client, expected, may_close=may_close, behind_router=behind_router):
                raise Fault(found)
        if this.ends_the_front:
            target.gone(family, 0 if this.signal == "TERM" else -signal.SIGKILL)
            target.up()
        else:
            target.well()
        for number in {client.number for client in load.clients[:2]} | {draw.randrange(NUM_PROMPTS)}:
            if (tokens := target.ask(number)) != self._expected[number]:
                raise Fault(f"wrong tokens after it, of prompt {number}: {tokens}, not {self._expected[number]}")
        target.well()
        target.same_shape()

    def report(self) -> dict[str, Any]:
        """What was run, what clients were told, and what did not hold."""
        return {
            "seed": self._seed,
            "runs": self.num_runs,
            "seconds": round(time.monotonic() - self._began_s),
            "cases": dict(sorted(self._cases.items())),
            "clients_told": dict(sorted(self._told.items())),
            "starts": {name: target.num_starts for name, target in sorted(self._targets.items())},
            "faults": self.faults,
        }


def _strike(victim: psutil.Process, name: str, draw: random.Random) -> threading.Thread:
    """Send the signal; the result ends when nothing more is sent. A stopped process goes on after a while."""
    stops_s = draw.uniform(0.1, 2.0)

    def go_on() -> None:
        if name == "STOP":
            time.sleep(stops_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)

    with contextlib.suppress(ProcessLookupError):
        os.kill(victim.pid, SIGNALS[name])
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    return thread
