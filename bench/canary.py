"""What the canary takes of the engine's time: measured inside the engine, and as a ratio of rates with and without it.

    python bench/canary.py                    8 runs of each, in turn, about two minutes
    python bench/canary.py --share 5%         another budget
    python bench/canary.py --toy              small sizes, in seconds; fails if nothing is looked at

The bundled model answers 16 prompts at once; half of each prompt is shared with an earlier one, so that pages are hit.
Its steps take some milliseconds, which is short: what a step needs of the canary is a greater part of it than with
larger models.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, SamplingParams

ROWS, SHARED, OWN, OUTPUT = 16, 192, 192, 384


def prompts(rng: np.random.Generator, shared: list[list[int]], rows: int) -> list[dict[str, Any]]:
    """`rows` prompts, each of which begins as one of `shared`."""
    return [
        {"prompt_token_ids": shared[int(rng.integers(len(shared)))] + rng.integers(1, 300, OWN).tolist()}
        for _ in range(rows)
    ]


def run(llm: LLM, requests: list[dict[str, Any]], output: int) -> dict[str, float]:
    """One batch: seconds of the clock, tokens, and what the canary says it took of them."""
    canary = llm.engine.proof.canary
    # What the canary has saved up while the other engine ran is spent here.
    llm.generate(requests[:1], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
    before = canary.statistics() if canary is not None else {}
    began = time.perf_counter()
    llm.generate(requests, SamplingParams(max_tokens=output, temperature=0, ignore_eos=True))
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, "tokens_per_s": len(requests) * output / seconds}
    if canary is not None:
        after = canary.statistics()
        found["canary"] = (after["seconds"] - before["seconds"]) / seconds
        found["looked_at"] = sum(after[name] - before[name] for name in ("stamped_pages", "hit_pages", "swept_pages"))
    return found


def measure(share: str, runs: int, *, rows: int, output: int) -> dict[str, Any]:
    """Runs with and without, in turn, each on the same prompts."""
    rng = np.random.default_rng(1)
    shared = [rng.integers(1, 300, SHARED).tolist() for _ in range(4)]
    engines = {"off": LLM(canary="off"), share: LLM(canary=share)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    try:
        for at in range(runs + 1):
            requests = prompts(rng, shared, rows)
            for name in sorted(engines, reverse=bool(at % 2)):
                result = run(engines[name], requests, output)
                if at:  # the first warms up
                    found[name].append(result)
            print(f"{at}/{runs}", end="\r", flush=True)
    finally:
        for llm in engines.values():
            llm.close()
    took = [result["canary"] for result in found[share]]
    ratios = [
        with_it["tokens_per_s"] / without["tokens_per_s"]
        for with_it, without in zip(found[share], found["off"], strict=True)
    ]
    return {
        "share": share,
        "runs": runs,
        "rows": rows,
        "took_median": statistics.median(took),
        "took_highest": max(took),
        "rate_ratio_median": statistics.median(ratios),
        "rate_ratios": ratios,
        "looked_at_pages": sum(result["looked_at"] for result in found[share]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", default="1%")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.toy:
        found = measure("4%", 2, rows=4, output=24)
        assert found["looked_at_pages"] > 0, "the canary has looked at nothing"
    else:
        found = measure(chosen.share, chosen.runs, rows=ROWS, output=OUTPUT)
    print(f"the canary took {found['took_median']:.2%} of the time (median), {found['took_highest']:.2%} at most;")
    print(f"{found['looked_at_pages']:.0f} pages looked at; rate with / without: {found['rate_ratio_median']:.3f}")
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
