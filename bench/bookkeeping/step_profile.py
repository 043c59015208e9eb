"""What a whole decode step still calls, module by module: Python functions, functions in C, microseconds.

    python -m bench.bookkeeping.step_profile                                 256 requests, full attention
    python -m bench.bookkeeping.step_profile --kind full+window --running 64
    python -m bench.bookkeeping.step_profile --turnover                      a request ends and another begins in a step

A function outside `quire` counts for the module of `quire` that calls it. Indexing and arithmetic of numpy are no
calls, and are in the time alone. Times are wall time with the profiler on, of each module the least of many runs. Their
sum is more than twice a step's: they say where it goes, not how much it is.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from typing import Any

from bench.bookkeeping.workloads import TOY, Sizes
from bench.peers.quire_step import Steps, Turnover

SOURCE = "/quire/"
OUTSIDE = "the loop and the model here"


class Profile:
    """Calls and nanoseconds by module, for `sys.setprofile`."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.spent: Counter[str] = Counter()
        self._modules = [OUTSIDE]
        self._since = 0

    def begin(self) -> None:
        """Time counts from here."""
        self._since = time.perf_counter_ns()

    def __call__(self, frame: Any, event: str, _argument: Any) -> None:
        self.spent[self._modules[-1]] += time.perf_counter_ns() - self._since
        if event == "call":
            _, inside, path = frame.f_code.co_filename.rpartition(SOURCE)
            module = path.removesuffix(".py") if inside else self._modules[-1]
            self._modules.append(module)
            self.python[module] += 1
        elif event == "return" and len(self._modules) > 1:
            self._modules.pop()
        elif event == "c_call":
            self.others[self._modules[-1]] += 1
        self._since = time.perf_counter_ns()


def profiled(steps: Steps | Turnover, count: int) -> Profile:
    """So many steps."""
    profile = Profile()
    for _ in range(count):
        profile.begin()
        sys.setprofile(profile)
        try:
            steps.step()
        finally:
            sys.setprofile(None)
    return profile


def main() -> None:
    """Profile and print a table in Markdown."""
    parser = argparse.ArgumentParser(description="Say what a decode step calls.")
    parser.add_argument("--kind", default="full", help="groups: full, full+window or full+state")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--turnover", action="store_true", help="in each step one request ends and another begins")
    parser.add_argument("--toy", action="store_true", help="few steps")
    options = parser.parse_args()
    sizes, runs, count = (TOY, 2, 8) if options.toy else (Sizes(), 24, 32)
    kind = Turnover if options.turnover else Steps
    steps = kind(options.kind, options.page, options.running, sizes)
    steps.ready(runs * count + 4)
    for _ in range(4):
        steps.step()
    gc.collect()
    gc.disable()
    found = [profiled(steps, count) for _ in range(runs)]
    least = {module: min(profile.spent[module] for profile in found) / count / 1e3 for module in found[-1].spent}
    python_calls = sum((profile.python for profile in found), Counter[str]())
    other_calls = sum((profile.others for profile in found), Counter[str]())
    print("| module | Python functions | functions in C | µs |\n|---|---|---|---|")
    for module in sorted(least, key=lambda name: -least[name]):
        python, others = python_calls[module] / runs / count, other_calls[module] / runs / count
        print(f"| {module} | {python:.1f} | {others:.1f} | {least[module]:.1f} |")
    python, others = python_calls.total() / runs / count, other_calls.total() / runs / count
    print(f"| all | {python:.1f} | {others:.1f} | {sum(least.values()):.1f} |")


if __name__ == "__main__":
    main()
