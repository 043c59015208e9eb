"""Saving and loading beneath vLLM: Quire's tier and vLLM's own `fs` tier, in CPU time and in bytes a second.

    python -m bench.connectors.vllm_tier --python VLLM/bin/python     about two minutes
    python -m bench.connectors.vllm_tier --toy --python ...           small sizes, in seconds; fails if a byte is wrong

Both tiers are beneath vLLM's own primary tier, without a model, on the same disk. Both go around the page cache where
the disk can. Quire's digests are on; vLLM's tier has none. A turn saves all chunks and loads them; tiers take turns in
shuffled order, and ratios are medians over turns. `lookup` is the time of the scheduler's thread for 1,000 keys: the
first time, and when the answers are there. `floor` is what one thread needs to read the chunks, to digest them, and to
read them from memory once: a load that checks all bytes costs at least the first and the last.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.harness import Worker, machine, new_parser, save, shuffled

from quire.plan.budget import format_bytes

TIERS: dict[str, dict[str, Any]] = {
    "fs": {"type": "fs"},
    "quire": {"type": "QuireTier", "module_path": "quire.connectors.vllm", "weights": "none", "save_share": 1.0},
}
LAYER_BYTES = 64 << 10  # of a block of 16 tokens


def measure(python: str, folder: Path, layers: int, total: int, turns: int) -> dict[str, Any]:
    """One chunk size: CPU seconds per GB, GB per second, and the ratios of Quire's tier to vLLM's."""
    chunks = total // (layers * LAYER_BYTES)
    places = {"fs": {"root_dir": str(folder / "fs")}, "quire": {"store": str(folder / "quire"), "store_size": "16GiB"}}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in TIERS}
    with ExitStack() as stack:
        workers = {}
        for name, tier in TIERS.items():
            (folder / name).mkdir()
            workers[name] = Worker(python, "vllm_tiers.py", name, folder / f"{name}.log", os.environ)
            stack.callback(workers[name].close)
            model = folder / f"model-{name}"
            model.mkdir()
            workers[name].ask("start", folder=str(model), tier=tier | places[name], layers=layers, chunks=chunks)
        for turn in range(turns + 1):
            for name in shuffled(list(TIERS), turn):
                for verb in ("save", "load"):
                    found = workers[name].ask(verb, turn=turn)
                    if turn:  # the first one makes files and starts threads
                        samples[name].setdefault(f"{verb}_cpu_s_per_gb", []).append(found["cpu_seconds"] / total * 1e9)
                        samples[name].setdefault(f"{verb}_gb_per_s", []).append(total / found["seconds"] / 1e9)
                for which, milliseconds in workers[name].ask("lookup", keys=1000).items():
                    samples[name].setdefault(f"lookup_{which}", []).append(milliseconds)
        floor = workers["quire"].ask("floor", folder=str(folder))
        for worker in workers.values():
            worker.ask("stop")
    by_turn = {
        "save": [of["save_cpu_s_per_gb"] for of in samples.values()],
        "load": [of["load_cpu_s_per_gb"] for of in samples.values()],
    }
    by_turn["both"] = [[sum(each) for each in zip(*pair, strict=True)] for pair in zip(*by_turn.values(), strict=True)]
    return {
        "chunk_bytes": layers * LAYER_BYTES,
        "bytes": total,
        "floor_cpu_s_per_gb": floor,
        **{name: {what: statistics.median(values) for what, values in of.items()} for name, of in samples.items()},
        "bytes_per_cpu_second_to_fs": {
            what: statistics.median(fs / own for fs, own in zip(*pair, strict=True)) for what, pair in by_turn.items()
        },
    }


def main() -> None:
    """Measure each size, and print a table."""
    parser = new_parser("Tiers beneath vLLM.")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: a temporary one")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    sizes, total, turns = ((2, 16), 32 << 20, 1) if options.toy else ((2, 8, 32), 256 << 20, options.turns)
    rows = []
    print(
        "chunk      | CPU s/GB, save: fs, Quire | load: fs, Quire | floor: read, digest, pass"
        " | bytes per CPU s, to fs: save, load, both | lookup"
    )
    for layers in sizes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            row = measure(options.python, Path(folder), layers, total, turns)
        fs, own, to_fs = row["fs"], row["quire"], row["bytes_per_cpu_second_to_fs"]
        floor = " ".join(f"{seconds:.3f}" for seconds in row["floor_cpu_s_per_gb"].values())
        print(
            f"{format_bytes(row['chunk_bytes']):10} | {fs['save_cpu_s_per_gb']:.3f} {own['save_cpu_s_per_gb']:.3f}"
            f" | {fs['load_cpu_s_per_gb']:.3f} {own['load_cpu_s_per_gb']:.3f} | {floor}"
            f" | {to_fs['save']:.2f} {to_fs['load']:.2f} {to_fs['both']:.2f}"
            f" | {own['lookup_first_ms']:.2f} ms, {own['lookup_again_ms']:.2f} ms"
        )
        rows.append(row)
    save(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
