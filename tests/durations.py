"""Seconds of each test file, recorded by every run and kept of full ones: tests/durations.json.

A run writes `build/durations.json`: by file, seconds of CPU (of its process and of those that it started) and of wall
time, and the seconds that collecting took. Files run in the order of the kept seconds, longest first, so that no
process is alone with a long file at the end.

    make test && python -m tests.durations            show the run's longest files
    python -m tests.durations --write                 keep the seconds of this run
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.forked import workers_cpu_s
from tests.programs import forked_cpu_s

ROOT = Path(__file__).parents[1]
RECORDED, KEPT = ROOT / "build" / "durations.json", ROOT / "tests" / "durations.json"
QUICK = "not slow and not gpu"
"""The selection of `make test`."""

COLLECTING = "collecting"
_SHOWN = 40


@cache
def kept() -> dict[str, float]:
    """By file, the seconds of CPU when they were last kept."""
    found: dict[str, float] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return found


def cpu_s() -> float:
    """Seconds of CPU of this process, of those that it waited for, and of those that were forked for it."""
    return sum(os.times()[:4]) + workers_cpu_s() + forked_cpu_s()


class Durations:
    """A plugin of pytest, in each process of a run. The first one gathers what the others measured."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cpu_s: dict[str, float] = {}
        self._wall_s: dict[str, float] = {}
        self._began = time.monotonic(), cpu_s()

    def _add(self, name: str, cpu: float, wall: float) -> None:
        self._cpu_s[name] = self._cpu_s.get(name, 0.0) + cpu
        self._wall_s[name] = self._wall_s.get(name, 0.0) + wall

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """All tests are collected, in each process."""
        yield
        wall, cpu = self._began
        self._add(COLLECTING, cpu_s() - cpu, time.monotonic() - wall)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """One test, with the fixtures that begin or end with it."""
        wall, cpu = time.monotonic(), cpu_s()
        yield
        self._add(item.path.relative_to(ROOT).as_posix(), cpu_s() - cpu, time.monotonic() - wall)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of pytest-xdist has ended."""
        for name, (cpu, wall) in getattr(node, "workeroutput", {}).get("durations", {}).items():
            self._add(name, cpu, wall)

    def pytest_sessionfinish(self) -> None:
        """Write what was measured, or give it to the first process."""
        files = {name: (self._cpu_s[name], self._wall_s[name]) for name in self._cpu_s}
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["durations"] = files
            return
        rounded = {name: [round(cpu, 2), round(wall, 2)] for name, (cpu, wall) in sorted(files.items())}
        RECORDED.parent.mkdir(exist_ok=True)
        selection = " ".join(filter(None, (self._config.getoption("-m"), self._config.getoption("-k"))))
        RECORDED.write_text(json.dumps({"selection": selection, "seconds": rounded}, indent=0))


def main() -> None:
    """Show the last run, or keep it."""
    recorded = json.loads(RECORDED.read_text())
    seconds = {name: cpu for name, (cpu, _) in recorded["seconds"].items()}
    longest = sorted(seconds, key=lambda name: (-seconds[name], name))
    if "--write" not in sys.argv:
        print(f"{sum(seconds.values()):8.1f} s of CPU in all")
        for name in longest[:_SHOWN]:
            print(f"{seconds[name]:8.1f} {name}")
        return
    if recorded["selection"] != QUICK:
        raise SystemExit("The last run selected other tests than `make test`, whose seconds are kept. Run it first.")
    gone = {name for name in kept() if not (ROOT / name).exists()}
    every = {name: seconds for name, seconds in (kept() | seconds).items() if name not in gone}
    rows = (f'"{name}": {every[name]:.1f}' for name in sorted(every, key=lambda name: (-every[name], name)))
    KEPT.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
