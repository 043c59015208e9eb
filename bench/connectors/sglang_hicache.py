"""Saves and loads of SGLang's HiCache on a directory of Quire's, beside its own `file` backend, by CPU time and time.

    python -m bench.connectors.sglang_hicache --peers DIR     SGLang of `bench/peers/install.py` in DIR/sglang-cache

SGLang's own controller, threads and host pools run; pages go from the host pool to the disk and back. Quire's records
have digests, which are checked; SGLang's files have none. Every sample is of a new prompt, and compares what came back.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import ALLOCATOR, Worker, machine, new_parser, save, shuffled

FILE = "file"
BACKENDS: dict[str, dict[str, Any] | None] = {
    FILE: None,
    "quire": {"interface_v1": 1, "direct": False},
    "quire, O_DIRECT": {"interface_v1": 1, "direct": True},
}
LAYOUTS = ("page_first_direct", "layer_first", "page_first")
SHAPES = {
    "4 MiB": ({"layers": 32, "heads": 8, "head_dim": 128, "page": 32}, 24),
    "512 KiB": ({"layers": 16, "heads": 8, "head_dim": 64, "page": 16}, 128),
    "8 KiB": ({}, 20),
}
"""The bytes of a page, with the pool that has them and the pages of a prompt. The last is the prompt of 320 tokens."""
TOY = {"8 KiB": ({}, 20)}


def measure(worker: Worker, layout: str, size: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each step, with what each backend took."""
    shape, pages = options.shapes[size]
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in BACKENDS}
    with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=options.folder) as folder:
        tokens = shape.get("page", 16) * (pages + 1)
        for name, extra in BACKENDS.items():
            place = Path(folder, name.replace(", ", "-"))
            place.mkdir()
            given = None if extra is None else {"store_size": "1GiB"} | extra
            whole = {"layout": layout, "device_tokens": 64, "host_tokens": tokens} | shape
            worker.ask("open", name=name, folder=str(place), extra=given, shape=whole)
        for turn in range(options.repeats + 1):
            for name in shuffled(BACKENDS, turn):
                one_by_one = size == "8 KiB" and name == "quire"
                found = worker.ask("sample", name=name, turn=turn, pages=pages, one_by_one=one_by_one)
                if turn:
                    samples[name].append(found)
        for name in BACKENDS:
            worker.ask("close", name=name)
    return [
        {
            "layout": layout,
            "page": size,
            "row": row,
            **{
                f"{what}_ms": {name: medians(each, row, what) for name, each in samples.items()}
                for what in ("cpu", "wall")
            },
            "ratio": {name: ratio(each, samples[FILE], row) for name, each in samples.items() if name != FILE},
        }
        for row in samples["quire"][0]
    ]


def medians(samples: list[dict[str, Any]], row: str, what: str) -> float | None:
    """Milliseconds."""
    key = {"cpu": "cpu_s", "wall": "seconds"}[what]
    times = [sample[row][key] for sample in samples if row in sample]
    return 1000 * statistics.median(times) if times else None


def ratio(samples: list[dict[str, Any]], others: list[dict[str, Any]], row: str) -> float | None:
    """How often the other's CPU time is ours: the median over samples of the same turn."""
    both = [(one[row], other[row]) for one, other in zip(samples, others, strict=True) if row in one and row in other]
    return statistics.median(other["cpu_s"] / one["cpu_s"] for one, other in both) if both else None


def show(rows: list[dict[str, Any]]) -> None:
    """Milliseconds of CPU and of time, and the ratio to SGLang's own backend."""
    print(f"{'layout':18} {'page':8} {'':15} " + " ".join(f"{name:>26}" for name in BACKENDS))
    for row in rows:
        cells = []
        for name in BACKENDS:
            cpu, wall, found = row["cpu_ms"][name], row["wall_ms"][name], row["ratio"].get(name)
            times = "-" if cpu is None else f"{cpu:.1f} / {wall:.1f} ms" + (f" {found:5.2f}x" if found else "")
            cells.append(f"{times:>26}")
        print(f"{row['layout']:18} {row['page']:8} {row['row']:15} " + " ".join(cells))


def main() -> int:
    """Measure, print, write."""
    parser = new_parser(__doc__ or "")
    parser.add_argument("--peers", type=Path, default=Path.home() / ".cache" / "quire-bench", help="%(default)s")
    parser.add_argument("--folder", type=Path, help="where records and files lie; default: the system's temporary one")
    parser.add_argument("--repeats", type=int, help="samples of each; default 9, with --toy 2")
    options = parser.parse_args()
    options.repeats = options.repeats or (2 if options.toy else 9)
    options.shapes = TOY if options.toy else SHAPES
    python = options.peers / "sglang-cache" / "bin" / "python"
    if not python.exists():
        print(f"there is no {python}; bench/peers/install.py makes it", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": "1"}
        worker = Worker(str(python), "hicache_worker.py", "hicache", Path(folder, "worker.log"), env)
        rows = [row for layout in LAYOUTS for size in options.shapes for row in measure(worker, layout, size, options)]
        worker.close()
    show(rows)
    save(options.json, {"machine": machine(), "repeats": options.repeats, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
