"""What the start of `quire serve` costs: CPU seconds of all its processes until /health answers.

python -m bench.serving.start                                  five starts of the bundled model
python -m bench.serving.start --beside ../old --rounds 3       in turns with another checkout of Quire
python -m bench.serving.start --toy                            one start
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
from bench.harness import machine, new_parser, save

HERE = Path(__file__).parents[2]
_PATIENCE_S = 120.0


def start_cpu_s(checkout: Path) -> float:
    """CPU seconds of one start of the server of `checkout`."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port)]
    # As in an installed Quire, modules are compiled once: by the first start of a checkout.
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": ""}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=checkout, env=environment, stdout=quiet, stderr=quiet) as server:
        try:
            until = time.monotonic() + _PATIENCE_S
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server of {checkout} did not start")
                time.sleep(0.05)
            processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
            return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
        finally:
            server.terminate()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _commit(checkout: Path) -> str:
    found = subprocess.run(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip()


def main() -> None:
    """Start servers in turns, and print medians."""
    parser = new_parser("Measure the CPU time of a start.", toy="one start")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="another checkout of Quire")
    options = parser.parse_args()
    checkouts = [HERE, *([options.beside.resolve()] if options.beside else [])]
    starts: dict[str, list[float]] = {_commit(checkout): [] for checkout in checkouts}
    facts = machine()
    for _ in range(1 if options.toy else options.rounds):
        for checkout in checkouts:
            starts[_commit(checkout)].append(start_cpu_s(checkout))
    for commit, seconds in starts.items():
        print(f"{commit}: {statistics.median(seconds):.2f} s of CPU ({min(seconds):.2f} .. {max(seconds):.2f})")
    save(options.json, {"machine": facts, "cpu_s_by_commit": starts})


if __name__ == "__main__":
    main()
