"""What all benchmarks share: folders, options, the machine's facts, samples in turns, workers, and results as JSON.

Programs run from the root of the checkout: `python -m bench.GROUP.NAME`. The programs that they start find `bench` too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "bench" / "peers"
SHARED = ROOT.parent / "shared"
"""Where traces may lie that are not a part of the repository."""
SEED = 20
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
"""For all: without it a fresh array of some megabytes costs a page fault per 4 KiB."""

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

Samples = Mapping[str, Sequence[float]]


def new_parser(description: str, *, toy: str = "small sizes, in seconds") -> argparse.ArgumentParser:
    """A parser with `--toy` and `--json FILE`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help=toy)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    return parser


def save(path: Path | None, result: Any) -> None:
    """Write a result as JSON, if `--json` named a file."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def machine(**more: Any) -> dict[str, Any]:
    """The date, the processor, the load of the last five minutes and the versions that a result is of."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),
        "system": platform.system(),
        "python": platform.python_version(),
        **more,
    }


def cpu_model() -> str:
    """The processor's own name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def in_turns(work: Mapping[str, Callable[[], float]], repeats: int, seed: object = SEED) -> dict[str, list[float]]:
    """What each call returns, `repeats` times after one that does not count, each time in another order."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 1):
        for name in shuffled(work, seed, repeat):
            value = work[name]()
            if repeat:
                found[name].append(value)
    return found


def shuffled(names: Sequence[str] | Mapping[str, object], *seed: object) -> list[str]:
    """The names in an order that `seed` draws: what else the machine does falls on all alike."""
    order = list(names)
    random.Random(" ".join(map(str, seed))).shuffle(order)
    return order


def ratio(samples: Samples, name: str, to: str) -> float:
    """The median over repeats of the value of one row as a part of another's."""
    return statistics.median(one / other for one, other in zip(samples[name], samples[to], strict=True))


def best(samples: Samples, name: str, to: str) -> float:
    """The smallest value of one row as a part of another's smallest."""
    return min(samples[name]) / min(samples[to])


class Worker:
    """A process of `bench/peers` that answers lines of JSON, by any interpreter. `log` gets its standard error.
    Quire is that of `checkout`."""

    def __init__(
        self, python: str, script: str, name: str, log: Path, env: Mapping[str, str], checkout: Path = ROOT
    ) -> None:
        self.name = name
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, str(PEERS / script), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=dict(env) | {"PYTHONPATH": f"{ROOT}{os.pathsep}{checkout / 'src'}"},
                cwd=log.parent,
            )

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send one request and wait. Raises RuntimeError with its error, or with the last one of its log if it dies."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do} | request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            lines = [text.strip() for text in self._log.read_text().splitlines() if text.strip()]
            lines = [text for text in lines if "Error" in text.partition(":")[0]] or lines
            raise RuntimeError(lines[-1] if lines else f"ended with status {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
