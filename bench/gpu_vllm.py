"""vLLM with Quire's tier on a machine with a GPU, in ten minutes: a restart, flipped bits, and throughput.

    python bench/gpu_vllm.py --model MODEL --json found.json     with vLLM's interpreter, on a machine with a GPU
    python bench/gpu_vllm.py --toy --python VLLM/bin/python      the same on a CPU, with a tiny model, for CI

Runs, each in a new process: vLLM alone; with an empty store; with the store that this one has left; with a flipped bit
in each second record of it. Each runs the prompts twice, the second time with its own prefix cache where it has one.
Tokens are compared with those of vLLM alone, `equal` with its first run and `equal_cached` with its second: a low
precision may give others where chunks end elsewhere. The exit status is 1 if a request failed, nothing was loaded after
the restart, a flipped record was not noticed, or, in float32, tokens differ.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "src")]

from bench.harness import Worker, machine, new_parser, save  # noqa: E402

from quire.memory.record import HEADER_BYTES  # noqa: E402
from quire.tiers.scope_facts import is_facts  # noqa: E402
from quire.tiers.store import Answer  # noqa: E402
from quire.tiers.stores.registry import open_store  # noqa: E402

Found = dict[str, Any]


def flip(store: str) -> int:
    """Flip a bit of each second record; returns of how many."""
    drawn, flipped = random.Random(20), 0
    with closing(open_store(store)) as opened:
        sizes = {entry.key: entry.num_bytes for entry in opened.entries() if not is_facts(entry.key)}
        for key in sorted(sizes)[::2]:
            record = bytearray(sizes[key])
            assert opened.get([key], [record]) == [Answer.HIT]
            record[drawn.randrange(HEADER_BYTES, len(record))] ^= 1 << drawn.randrange(8)
            opened.remove([key])
            opened.prepare([key], [len(record)])
            opened.put([key], [record])
            flipped += opened.complete([key], [True]) == [Answer.HIT]
    return flipped


def run(python: str, start: Found, prompts: list[list[int]], new: int, log: Path) -> Found:
    """Start vLLM and run the prompts twice. What is to be saved is saved at the end."""
    worker = Worker(python, "vllm_tiered.py", "engine", log, os.environ)
    try:
        found: Found = {"start_s": worker.ask("start", **start)["seconds"]}
        runs = [worker.ask("run", prompts=prompts, new=new) for _ in range(2)]
        began = time.perf_counter()
        if start["tiers"]:
            found["is_settled"] = worker.ask("settle", seconds=60)["is_settled"]
            found["settle_s"] = time.perf_counter() - began
            found["metrics"] = worker.ask("metrics")
        worker.ask("stop")
    finally:
        worker.close()
    ends = {end for each in runs for end in each["ends"]}
    cached = [sum(each["cached"]) for each in runs]
    seconds = [each["seconds"] for each in runs]
    return found | {"seconds": seconds, "cached": cached, "ends": sorted(ends), "tokens": [r["tokens"] for r in runs]}


def compared(name: str, found: Found, alone: Found) -> Found:
    """A line of the result: how many outputs are those of vLLM alone, and what was moved how fast."""
    same = [
        sum(one == other for one, other in zip(found["tokens"][0], tokens, strict=True)) for tokens in alone["tokens"]
    ]
    metrics = found.get("metrics", {})
    line = {"run": name, **{key: value for key, value in found.items() if key not in ("tokens", "metrics")}}
    line |= {"equal": same[0], "equal_cached": same[1], "of": len(found["tokens"][0])}
    line |= {key: value for key, value in metrics.items() if key.startswith("quire_")}
    for moved in ("read", "write"):
        num_bytes = metrics.get(f"tiering_{moved}_bytes 1:QuireTier", 0)
        seconds = metrics.get(f"tiering_{moved}_time 1:QuireTier", 0)
        line[f"{moved}_gb_per_s"] = num_bytes / seconds / 1e9 if seconds else None
    return line


def wrong(lines: Sequence[Found], flipped: int, *, is_exact: bool) -> list[str]:
    """What is not as it must be."""
    by_name = {line["run"]: line for line in lines}
    checks = {
        "a request failed": any(line["ends"] != ["length"] for line in lines),
        "nothing was loaded after the restart": not by_name["restart"].get("quire_hits"),
        "no record was flipped": not flipped,
        "flipped records were not noticed": not by_name["flipped"].get("quire_bad_records digest"),
        "tokens differ": is_exact and any(line["equal"] < line["of"] for line in lines),
    }
    return [what for what, is_so in checks.items() if is_so]


def main() -> None:
    """Run it all, print a line for each run, and say what is wrong."""
    parser = new_parser("vLLM with Quire's tier.", toy="a tiny model, with copies on the host")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--model", help="a folder or a name; a folder with a config.json alone gets random weights")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt; half of them are shared by four")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--host-gib", type=float, default=8.0, help="of vLLM's primary tier")
    parser.add_argument("--folder", type=Path, help="for the store; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        store = str(folder / "store")
        tier: Found = {"type": "QuireTier", "module_path": "quire.connectors.vllm", "store": store}
        tier |= {"store_size": "64GiB"}
        start: Found = {"folder": options.model, "on_device": True, "cpu_bytes": int(options.host_gib * 2**30)}
        vocabulary = 1000
        if options.toy:
            from tests.tiny_models import VOCAB_SIZE, save_tiny

            save_tiny("llama_gqa", folder / "model", num_attention_heads=4, num_key_value_heads=2, head_dim=32)
            start = {"folder": str(folder / "model")}
            tier["store_size"] = "256MiB"
            vocabulary, options.tokens, options.prompts, options.new = VOCAB_SIZE - 1, 300, 4, 8
        elif options.model is None:
            parser.error("give --model")
        elif Path(options.model).is_dir() and not list(Path(options.model).glob("*.safetensors")):
            start["load_format"] = "dummy"
            tier["weights"] = "random"
        drawn = random.Random(20)
        half = options.tokens // 2
        shared = [[drawn.randrange(1, vocabulary) for _ in range(half)] for _ in range(-(-options.prompts // 4))]
        prompts = [
            shared[at // 4] + [drawn.randrange(1, vocabulary) for _ in range(options.tokens - half)]
            for at in range(options.prompts)
        ]
        runs: dict[str, Found] = {}
        flipped = 0
        lines = []
        for kind in ("alone", "cold", "restart", "flipped"):
            if kind == "flipped":
                flipped = flip(store)
            tiers = [] if kind == "alone" else [tier]
            log = folder / f"{kind}.log"
            try:
                runs[kind] = run(options.python, start | {"tiers": tiers}, prompts, options.new, log)
            except RuntimeError as error:
                sys.exit(f"vLLM ended: {error}")
            lines.append(compared(kind, runs[kind], runs["alone"]))
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in lines[-1].items()})
        faults = wrong(lines, flipped, is_exact=options.toy)
    save(options.json, {"machine": machine(), "flipped": flipped, "runs": lines, "wrong": faults})
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
