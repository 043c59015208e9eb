#!/usr/bin/env python
"""HiSparse: what hot buffers cost and what they bring.

    python bench/hisparse.py                            all of it, some minutes
    python bench/hisparse.py --json RESULT.json --selections bench/results/selections-dsa-0.7.npz
    python bench/hisparse.py --toy                      small sizes, in seconds; CI runs it

- `bookkeeping`: CPU microseconds of `HotSlots.swap_in` per request and index, one thread.
- `hit_rates`: of hot buffers, beside Belady's optimum, on synthetic and recorded selections (`bench/dsa_model.py`
  trains a model for these, `quire record-selections` records them).
- `capacity`: requests of a context of 8 buffers in the same bytes of device memory, planned.
- `engine`: a small random model on this machine, contexts of 8 buffers, latents on the device and in host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from dsa_model import build

from quire.cli.planned_model import planned_model
from quire.engine.llm import LLM
from quire.plan.hisparse import hisparse_costs, hisparse_gain
from quire.plan.plan import PlanSettings
from quire.plan.planner import make_plan
from quire.scheduler.sampling_params import SamplingParams
from quire.sim.selections import Selections, drifting_selections, lru_hits, optimal_hits
from quire.sparse.hot_slots import HotSlots
from quire.spec.hisparse import HiSparseConfig

MODEL = "deepseek-ai/DeepSeek-V3.2"


def bookkeeping(*, toy: bool) -> Iterator[dict[str, Any]]:
    """Microseconds of a call per request and index, without the first calls, which fill the buffers."""
    top_k, context, steps = (64, 1024, 12) if toy else (2048, 32768, 40)
    for drift in (0.95, 0.99):
        for batch in (1, 4) if toy else (1, 16, 64):
            found = drifting_selections(drift, context=context, top_k=top_k, steps=steps, num_requests=batch)
            hot, times = HotSlots(1, batch, 2 * top_k), []
            for call in found.calls():
                newest = call.newest.astype(np.int64)
                began = time.thread_time_ns()
                hot.swap_in(0, call.request, call.positions, newest)
                times.append((time.thread_time_ns() - began) / 1000 / batch)
            times = times[steps // 4 :]
            yield {
                "drift": drift, "batch": batch, "top_k": top_k, "buffer": 2 * top_k, "context": context,
                "swapped_per_call": hot.swapped_tokens / batch / steps,
                "us": {"min": min(times), "median": statistics.median(times), "mean": statistics.fmean(times)},
            }  # fmt: skip


def hit_rates(recorded: Path | None, *, toy: bool) -> Iterator[dict[str, Any]]:
    """LRU beside the optimum."""
    context, top_k, steps = (512, 32, 30) if toy else (4096, 256, 120)
    sources: dict[str, Selections] = {
        f"drift {drift}": drifting_selections(drift, context=context, top_k=top_k, steps=steps)
        for drift in (0.8, 0.95, 0.99)
    }
    if recorded is not None:
        sources[f"recorded: {recorded.name}"] = Selections.load(recorded)
    for name, found in sources.items():
        for times in (1, 2, 4):
            size = times * found.positions.shape[1]
            lru, best = lru_hits(found, size), optimal_hits(found, size)
            yield {
                "selections": name, "context": int(found.newest.max()) + 1, "top_k": found.positions.shape[1],
                "buffer": size, "lru": lru.rate, "optimum": best.rate, "gap": best.rate - lru.rate,
            }  # fmt: skip


def capacity() -> Iterator[dict[str, Any]]:
    """Requests of a context of 8 buffers and more in the same bytes of device memory."""
    spec = planned_model(MODEL).spec
    for context in (32768, 131072):
        settings = PlanSettings(kv_memory=40 * 2**30, context=context, hisparse=HiSparseConfig(device_buffer_size=4096))
        plan = make_plan(spec, settings)
        gain = hisparse_gain(plan, lambda settings: make_plan(spec, settings), hisparse_costs(plan))
        hot, before = gain.requests, gain.resident_requests
        yield {
            "model": MODEL, "context": context, "buffer": 4096, "device_bytes": plan.kv_bytes,
            "host_bytes": plan.memory.host_bytes, "resident_requests": before, "requests": hot, "times": hot / before,
        }  # fmt: skip


def engine(*, toy: bool) -> Iterator[dict[str, Any]]:
    """Decode steps of a small random model, latents on the device and in host memory."""
    buffer, top_k = (32, 16) if toy else (256, 128)
    tokens, batches = (8, (2,)) if toy else (32, (1, 4, 16))
    context = 8 * buffer + tokens
    with tempfile.TemporaryDirectory() as folder:
        build(512, 2 * context, top_k).save_pretrained(folder)
        for batch in batches:
            rng = np.random.default_rng(batch)
            prompts = [{"prompt_token_ids": rng.integers(1, 500, 8 * buffer).tolist()} for _ in range(batch)]
            for hisparse in (None, {"device_buffer_size": buffer}):
                yield _engine_row(folder, prompts, tokens, context, hisparse)


def _engine_row(
    folder: str, prompts: list[Any], tokens: int, context: int, hisparse: dict[str, int] | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {"hisparse": hisparse, "max_running_requests": len(prompts), "kv_memory": "256MiB"}
    with LLM(folder, show_plan=False, skip_tokenizer_init=True, max_model_len=context, **settings) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))  # the prompts are cached
        seconds = []
        for most in (2, tokens):
            began = time.perf_counter()
            found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
            seconds.append(time.perf_counter() - began)
        counts = llm.engine.statistics()["hisparse"] or {}
    steps = tokens - 2
    return {
        "latents": "on the device" if hisparse is None else "in host memory", "batch": len(prompts), "context": context,
        "buffer": hisparse["device_buffer_size"] if hisparse is not None else 0,
        "steps_per_s": steps / (seconds[1] - seconds[0]),
        "swapped_bytes_per_step": counts.get("swapped_bytes", 0) / tokens,
        "hit_rate": counts["hit_tokens"] / (counts["hit_tokens"] + counts["swapped_tokens"]) if counts else None,
        "digest": hash(tuple(tuple(each.outputs[0].token_ids) for each in found)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--selections", type=Path, help="a file of recorded selections")
    given = parser.parse_args()
    result: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "load": os.getloadavg()}
    parts = {
        "bookkeeping": lambda: bookkeeping(toy=given.toy),
        "hit_rates": lambda: hit_rates(given.selections, toy=given.toy),
        "capacity": capacity,
        "engine": lambda: engine(toy=given.toy),
    }
    for name, part in parts.items():
        result[name] = []
        for row in part():
            result[name].append(row)
            print(name, json.dumps(row), flush=True)
    tokens = {(row["batch"], row.pop("digest")) for row in result["engine"]}
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    assert len(tokens) == len({batch for batch, _ in tokens}), "tokens differ between the places of latents"


if __name__ == "__main__":
    main()
