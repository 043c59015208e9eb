"""What the canary takes of the engine's time: measured inside the engine, and as a ratio of rates with and without it.

    python -m bench.engine.canary                    8 runs of each, in turn, about two minutes
    python -m bench.engine.canary --share 5%         another budget
    python -m bench.engine.canary --long             the warm batches of bench/engine/compare.py, about two minutes
    python -m bench.engine.canary --toy              small sizes, in seconds; fails if nothing is looked at

The bundled model answers 16 prompts at once; half of each prompt is shared with an earlier one, so that pages are hit.
Its steps take some milliseconds, which is short: what a step needs of the canary is a greater part of it than with
larger models. With `--long` it is the model of `engine/compare.py` in bfloat16: 16 prompts sharing a prefix of 2,048
cached tokens, and 32 new ones, which take about a second.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench.engine import compare as engine_benchmark
from bench.harness import new_parser

from quire import LLM, SamplingParams
from quire.canary.parts import CanaryPart
from quire.counters import plain

ROWS, SHARED, OWN, OUTPUT = 16, 192, 192, 384


def prompts(rng: np.random.Generator, shared: list[list[int]], rows: int) -> list[dict[str, Any]]:
    """`rows` prompts, each of which begins as one of `shared`."""
    return [
        {"prompt_token_ids": shared[int(rng.integers(len(shared)))] + rng.integers(1, 300, OWN).tolist()}
        for _ in range(rows)
    ]


def generate(llm: LLM, requests: list[dict[str, Any]], output: int) -> None:
    """Greedy, `output` tokens each."""
    llm.generate(requests, SamplingParams(max_tokens=output, temperature=0, ignore_eos=True))


def run(llm: LLM, first: list[dict[str, Any]], requests: list[dict[str, Any]], output: int) -> dict[str, float]:
    """One batch after `first`: seconds of the clock and of CPU, tokens, and what the canary says it took of them."""
    part = llm.engine.part(CanaryPart)
    canary = part.canary if part is not None else None
    # What the canary has saved up while the other engine ran is spent here.
    generate(llm, first, min(output, 16))
    before = plain(canary.counters()) if canary is not None else {}
    cpu, began = time.process_time(), time.perf_counter()
    generate(llm, requests, output)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    found = {"seconds": seconds, "cpu_seconds": cpu, "tokens_per_s": len(requests) * output / seconds}
    if canary is not None:
        after = plain(canary.counters())
        found["canary"] = (after["seconds"] - before["seconds"]) / seconds
        found["looked_at"] = sum(after[name] - before[name] for name in ("stamped_pages", "hit_pages", "swept_pages"))
    return found


def short_batches(rows: int) -> Callable[[int], tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Of run i: one prompt, and `rows` of which half is often cached."""
    rng = np.random.default_rng(1)
    shared = [rng.integers(1, 300, SHARED).tolist() for _ in range(4)]

    def batches(_: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        requests = prompts(rng, shared, rows)
        return requests[:1], requests

    return batches


def long_batches(shape: engine_benchmark.Shape) -> Callable[[int], tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Of run i: a batch with a prefix that nothing has seen, and one with the same prefix."""

    def batches(at: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        cold, warm = (
            [{"prompt_token_ids": prompt} for prompt in shape.prompts(at, mode)] for mode in engine_benchmark.MODES
        )
        return cold, warm

    return batches


def measure(
    share: str,
    runs: int,
    *,
    output: int,
    batches: Callable[[int], tuple[list[dict[str, Any]], list[dict[str, Any]]]],
    **settings: Any,
) -> dict[str, Any]:
    """Runs with and without, in turn, each on the same prompts."""
    engines = {"off": LLM(canary="off", **settings), share: LLM(canary=share, **settings)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    try:
        for at in range(runs + 1):
            first, requests = batches(at)
            for name in sorted(engines, reverse=bool(at % 2)):
                result = run(engines[name], first, requests, output)
                if at:  # the first warms up
                    found[name].append(result)
            print(f"{at}/{runs}", end="\r", flush=True)
    finally:
        for llm in engines.values():
            llm.close()
    took = [result["canary"] for result in found[share]]
    pairs = list(zip(found[share], found["off"], strict=True))
    ratios = [with_it["tokens_per_s"] / without["tokens_per_s"] for with_it, without in pairs]
    return {
        "share": share,
        "runs": runs,
        "rows": len(requests),
        "seconds_median": statistics.median(result["seconds"] for result in found[share]),
        "took_median": statistics.median(took),
        "took_highest": max(took),
        "rate_ratio_median": statistics.median(ratios),
        "rate_ratios": ratios,
        "cpu_ratio_median": statistics.median(
            with_it["cpu_seconds"] / without["cpu_seconds"] for with_it, without in pairs
        ),
        "looked_at_pages": sum(result["looked_at"] for result in found[share]),
    }


def measure_long(share: str, runs: int, shape: engine_benchmark.Shape) -> dict[str, Any]:
    """With the model and the prompts of bench/engine/compare.py."""
    with tempfile.TemporaryDirectory(prefix="quire-canary-") as folder:
        engine_benchmark.save_model(shape, Path(folder))
        return measure(
            share,
            runs,
            output=shape.new,
            batches=long_batches(shape),
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            kv_memory="512MiB",
            max_model_len=shape.max_model_len,
        )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--share", default="1%")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--long", action="store_true", help="long hits, as in bench/engine/compare.py")
    chosen = parser.parse_args()
    if chosen.long:
        shape = engine_benchmark.TOY if chosen.toy else engine_benchmark.Shape()
        found = measure_long("20%" if chosen.toy else chosen.share, 8 if chosen.toy else chosen.runs, shape)
    elif chosen.toy:
        found = measure("4%", 2, output=24, batches=short_batches(4))
    else:
        found = measure(chosen.share, chosen.runs, output=OUTPUT, batches=short_batches(ROWS))
    assert found["looked_at_pages"] > 0, "the canary has looked at nothing"
    print(f"the canary took {found['took_median']:.2%} of the time (median), {found['took_highest']:.2%} at most;")
    print(f"{found['looked_at_pages']:.0f} pages looked at; with / without: rate {found['rate_ratio_median']:.3f},")
    print(f"CPU time {found['cpu_ratio_median']:.3f}; {found['seconds_median']:.2f} s a batch")
    if chosen.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        found |= {
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit.stdout.strip(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "load": os.getloadavg()[0],
        }
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
