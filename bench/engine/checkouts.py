"""This checkout beside another one of Quire: the same batches on the same models, in turns, in one process each.

    python -m bench.engine.checkouts ../old                       four models, both dtypes, about six minutes
    python -m bench.engine.checkouts ../old --dtype float32 --repeats 9
    python -m bench.engine.checkouts ../old --toy                 small sizes, in seconds

`git worktree add ../old COMMIT` makes the other checkout. Ratios are medians over pairs of runs of one batch: time, and
CPU time of the process, of this checkout as parts of the other's. Below 1 this checkout is the faster one. Tokens
must be the same. Bfloat16 may round a prompt in other pieces: there the part of outputs that are equal is shown.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.engine.compare import TOY, Process, Shape, save_model
from bench.harness import ROOT, machine, new_parser, save, shuffled

BUNDLED = {"quire-bundled": 320, "quire-bundled-window": 320, "quire-bundled-recurrent": 320}
"""The bundled models, and how many ids prompts draw from."""


def batches(name: str, repeat: int, toy: bool) -> dict[str, tuple[list[list[int]], int]]:
    """By name, prompts and how many tokens each generates."""
    shape = shape_of(toy)
    if name == "llama-55M":
        cold, warm = (shape.prompts(repeat, mode) for mode in ("cold", "warm"))
        return {"16 cold": (cold, shape.new), "16 warm": (warm, shape.new), "1": (cold[:1], 4 * shape.new)}
    small = Shape(vocab=BUNDLED[name], requests=16, shared=64, own=64)
    prompts = small.prompts(repeat, "cold")
    return {"1": (prompts[:1], 64 if toy else 256), "16": (prompts, 16 if toy else 192)}


def shape_of(toy: bool) -> Shape:
    """What `engine/compare.py` measures."""
    return TOY if toy else Shape()


def measure(other: Path, dtype: str, repeats: int, folder: Path, toy: bool) -> dict[str, Any]:
    """By model and batch, ratios of this checkout to the other."""
    checkouts = {"this": ROOT, "other": other}
    workers = {
        name: Process("quire", sys.executable, 2, folder / f"{name}.log", own_malloc=False, checkout=checkout)
        for name, checkout in checkouts.items()
    }
    found: dict[str, Any] = {}
    try:
        for model in ("llama-55M", *BUNDLED):
            of_model: dict[str, dict[str, list[Any]]] = {}
            for worker in workers.values():
                worker.ask(
                    "start",
                    folder=str(folder / "llama") if model == "llama-55M" else model,
                    dtype=dtype,
                    threads=2,
                    kv_bytes=2**28 if model == "llama-55M" else 2**26,
                    max_model_len=shape_of(toy).max_model_len if model == "llama-55M" else 1024,
                    max_requests=16,
                )
            for repeat in range(repeats + 1):
                for batch, (prompts, new) in batches(model, repeat, toy).items():
                    runs = {
                        name: workers[name].ask("run", prompts=prompts, new=new)
                        for name in shuffled(workers, model, batch, repeat)
                    }
                    if not repeat:
                        continue
                    rows = of_model.setdefault(batch, {"time": [], "cpu": [], "equal": [], "seconds": []})
                    for key, field in (("time", "seconds"), ("cpu", "cpu_seconds")):
                        rows[key].append(runs["this"][field] / runs["other"][field])
                    rows["seconds"].append(runs["this"]["seconds"])
                    pairs = list(zip(runs["this"]["tokens"], runs["other"]["tokens"], strict=True))
                    rows["equal"].append(sum(one == two for one, two in pairs) / len(pairs))
            found[model] = {
                batch: {name: round(statistics.median(values), 4) for name, values in rows.items()}
                | {"ratios": [round(value, 3) for value in rows["time"]]}
                for batch, rows in of_model.items()
            }
            for batch, row in found[model].items():
                print(
                    f"{dtype:8} {model:24} {batch:8} time {row['time']:.3f}  CPU {row['cpu']:.3f}  "
                    f"outputs equal {row['equal']:.0%}  {row['seconds']:.2f} s",
                    flush=True,
                )
                if dtype == "float32" and row["equal"] != 1:
                    raise SystemExit(f"tokens of {model} differ between the checkouts")
    finally:
        for worker in workers.values():
            worker.close()
    return found


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("other", type=Path, help="another checkout of Quire")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    dtypes = ("float32", "bfloat16") if options.dtype == "both" else (options.dtype,)
    facts = machine(repeats=options.repeats)
    with tempfile.TemporaryDirectory(prefix="quire-checkouts-") as folder:
        save_model(shape_of(options.toy), Path(folder, "llama"))
        repeats = 1 if options.toy else options.repeats
        found = {dtype: measure(options.other.resolve(), dtype, repeats, Path(folder), options.toy) for dtype in dtypes}
    save(options.json, {"machine": facts, "ratios": found})


if __name__ == "__main__":
    main()
